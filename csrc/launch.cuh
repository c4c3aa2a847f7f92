// What every CUDA kernel here needs: launches that are checked, 16-byte accesses, and stretches
// that begin and end anywhere.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "kernels_cuda.h"

namespace fusedshard {

constexpr int kThreads = 256;  // of every block
// Least resident blocks of a multiprocessor: half of its threads, each with several 16-byte loads
// in flight, keep memory busy, and leave up to 64 registers for each.
constexpr int kBlocks = 4;
constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;

inline void check(cudaError_t error, const char* kernel) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA kernel ") + kernel + ": " +
                             cudaGetErrorString(error));
  }
}

// Makes a device the current one for a while: a stream can only be launched on from its device.
class DeviceGuard {
 public:
  DeviceGuard(int device, const char* kernel) : device_(device) {
    check(cudaGetDevice(&before_), kernel);
    if (before_ != device_) check(cudaSetDevice(device_), kernel);
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int before_ = 0;
};

// Blocks that the current device can run at once: the grid of a kernel that strides over its work.
// Asked once for each kernel and device.
template <typename Kernel>
int resident_blocks(const char* name, Kernel* kernel, int device) {
  static std::mutex mutex;
  static std::map<std::pair<Kernel*, int>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{kernel, device}];
  if (blocks == 0) {
    int processors = 0, blocks_each = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), name);
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, kThreads, 0), name);
    blocks = processors * blocks_each;
  }
  return blocks;
}

// Runs kernel(args...) on as many blocks as `wanted`, at most as many as the device holds.
template <typename... P>
void launch(const char* name, void (*kernel)(P...), int64_t wanted, const Stream& stream,
            std::common_type_t<P>... args) {
  if (wanted <= 0) return;
  const DeviceGuard guard(stream.device, name);
  const int64_t most = resident_blocks(name, kernel, stream.device);
  void* addresses[] = {&args...};
  const dim3 grid(static_cast<unsigned>(wanted < most ? wanted : most));
  check(cudaLaunchKernel(kernel, grid, dim3(kThreads), addresses, 0,
                         static_cast<cudaStream_t>(stream.handle)),
        name);
}

__device__ __forceinline__ int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t all_threads() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

inline int64_t blocks_for(int64_t work, int64_t each) { return (work + each - 1) / each; }

// What one access moves: as many bytes of codes as belong to 16 bytes of 16-bit numbers.
template <typename T>
constexpr int kAccessBytes = sizeof(T) == 1 ? kVectorBytes / 2 : kVectorBytes;

template <typename T>
struct alignas(kAccessBytes<T>) Vector {
  static constexpr int kWidth = kAccessBytes<T> / sizeof(T);
  T at[kWidth];
};

// CUDA's own vector type of it.
template <typename T>
using Packed =
    std::conditional_t<std::is_same_v<T, float>, float4,
                       std::conditional_t<std::is_same_v<T, double>, double2,
                                          std::conditional_t<sizeof(T) == 1, uint2, uint4>>>;

template <typename T>
__host__ __device__ __forceinline__ int64_t elements_to_alignment(const T* pointer) {
  const auto past = reinterpret_cast<uintptr_t>(pointer) % kVectorBytes;
  return past == 0 ? 0 : static_cast<int64_t>((kVectorBytes - past) / sizeof(T));
}

template <typename T>
__host__ __device__ __forceinline__ bool aligned(const T* pointer) {
  return elements_to_alignment(pointer) == 0;
}

template <typename T>
__device__ __forceinline__ Vector<T> load(const T* from) {
  return *reinterpret_cast<const Vector<T>*>(from);
}

template <typename T>
__device__ __forceinline__ void store(T* to, const Vector<T>& vector) {
  // Not an assignment, which nvcc splits where a branch precedes it.
  __stwb(reinterpret_cast<Packed<T>*>(to), reinterpret_cast<const Packed<T>&>(vector));
}

// Elements [0, end), of which [body, tail) are whole vectors that begin at aligned addresses.
// Index: an integer that holds `end`.
template <typename Index>
struct Span {
  Index body;
  Index tail;
  Index end;
};

// `lead`: elements before the first aligned address, or all of them where there is none.
template <typename T, typename Index>
__device__ __forceinline__ Span<Index> make_span(Index end, Index lead) {
  const Index body = lead < end ? lead : end;
  constexpr Index kWidth = Vector<T>::kWidth;
  return {body, body + (end - body) / kWidth * kWidth, end};
}

// A tile of a segment: its elements [first, first + span.end).
struct TileSpan {
  int64_t first;
  Span<int> span;
};

// Tile `index` of a segment of `length` elements that becomes aligned after `lead` of them, or
// never where that is all. Every tile but the first then begins at an aligned address.
template <typename T>
__device__ __forceinline__ TileSpan tile_span(int32_t index, int64_t length, int64_t lead) {
  const bool never = lead >= Vector<T>::kWidth;
  const int64_t shift = never ? 0 : lead;
  const int64_t first = index == 0 ? 0 : index * kTileElements + shift;
  const int64_t last = (index + 1) * kTileElements + shift;
  const int count = static_cast<int>((last < length ? last : length) - first);
  const int lead_here = never ? count : (index == 0 ? static_cast<int>(lead) : 0);
  return {first, make_span<T, int>(count > 0 ? count : 0, lead_here)};
}

// Calls scalar(i) for every element of a span outside the body, and vector(i) for the first of
// each vector in it, as thread `thread` of `threads`.
template <typename T, typename Index, typename Scalar, typename Whole>
__device__ __forceinline__ void for_span(const Span<Index>& span, Index thread, Index threads,
                                         const Scalar& scalar, const Whole& vector) {
  const Index odd = span.body + (span.end - span.tail);
  for (Index i = thread; i < odd; i += threads) {
    scalar(i < span.body ? i : span.tail + (i - span.body));
  }
  constexpr Index kWidth = Vector<T>::kWidth;
  for (Index i = span.body + thread * kWidth; i < span.tail; i += threads * kWidth) vector(i);
}

// The same for a tile, by the threads of its block.
template <typename T, typename Scalar, typename Whole>
__device__ __forceinline__ void for_tile(const Span<int>& span, const Scalar& scalar,
                                         const Whole& vector) {
  for_span<T, int>(span, static_cast<int>(threadIdx.x), kThreads, scalar, vector);
}

}  // namespace fusedshard
