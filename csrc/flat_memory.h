// Memory for the flat buffers: zeroed, page-aligned and backed by huge pages where the kernel
// agrees. The advice must come before the first touch, and an allocator that recycles touched
// blocks or fills them (torch's deterministic mode) cannot promise that; mmap can.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace fusedshard {

class FlatMemory {
 public:
  explicit FlatMemory(int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0) {
      throw std::invalid_argument("bytes: got " + std::to_string(bytes) + ", wanted above 0");
    }
    mapped_bytes_ = bytes + kHugePage;
    mapped_ = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
      throw std::runtime_error("cannot map " + std::to_string(bytes) +
                               " bytes: " + std::strerror(errno));
    }
    const auto base = reinterpret_cast<uintptr_t>(mapped_);
    data_ = reinterpret_cast<void*>((base + kHugePage - 1) / kHugePage * kHugePage);
    // A kernel without transparent huge pages answers EINVAL: slower, and nothing else.
    madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  }
  ~FlatMemory() { munmap(mapped_, static_cast<size_t>(mapped_bytes_)); }
  FlatMemory(const FlatMemory&) = delete;
  FlatMemory& operator=(const FlatMemory&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kHugePage = 2 << 20;  // of x86-64 and of aarch64 with 4 KiB pages
  int64_t bytes_;
  int64_t mapped_bytes_;
  void* mapped_;
  void* data_;
};

}  // namespace fusedshard
