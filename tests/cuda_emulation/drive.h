// What the drivers share. Each is a program of its own that runs the kernels of one CUDA source on
// the emulated devices and compares every bit with the CPU kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels_cuda.h"

namespace drive {

using namespace fusedshard;

// Below, at and beyond a vector, a block of threads and a tile; the rest is odd.
const std::vector<int64_t> kLengths = {1, 3, 7, 17 * 257, 4095, 4096, 4097, 8192 + 3};

// Defined by each driver: throws at the first difference.
void run_all();

template <typename T>
T convert(double x) {
  const auto single = static_cast<float>(x);
  if constexpr (std::is_same_v<T, BFloat16>) return to_bfloat16(single);
  if constexpr (std::is_same_v<T, Half>) return to_half(single);
  if constexpr (std::is_floating_point_v<T>) return static_cast<T>(x);
}

class Random {
 public:
  int64_t below(int64_t limit) { return static_cast<int64_t>(engine_() % limit); }

  // Between -2 and 2, of every size.
  template <typename T>
  T number() {
    const double unit = static_cast<double>(static_cast<int64_t>(engine_())) / 0x1p62;
    return convert<T>(below(4) == 0 ? unit * 1e-4 : unit);
  }

  // A number, now and then infinite, NaN or at an end of the type's range.
  template <typename T>
  T value() {
    using Limits = std::numeric_limits<Wide<T>>;
    const double odd[] = {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(), 0.0, -0.0,
                          Limits::max(),      Limits::denorm_min()};
    return below(50) == 0 ? convert<T>(odd[below(7)]) : number<T>();
  }

 private:
  std::mt19937_64 engine_{1};
};

template <typename T>
bool is_nan(const T& x) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return widen(x) != widen(x);
  }
}

// Equal bits, where all NaN count as equal.
template <typename T>
bool same(const T& a, const T& b) {
  return (is_nan(a) && is_nan(b)) || std::memcmp(&a, &b, sizeof(T)) == 0;
}

template <typename T>
std::string text(const T& x) {
  if constexpr (std::is_integral_v<T>) {
    return std::to_string(x);
  } else {
    return std::to_string(widen(x));
  }
}

// An array that begins `shift` elements past a 16-byte boundary and ends where its memory does, so
// that AddressSanitizer sees an access behind it. In front of it are bytes that must stay.
template <typename T>
class Array {
 public:
  explicit Array(int64_t length, int64_t shift = 0) : length_(length), shift_(shift) {
    const auto bytes = static_cast<size_t>(shift + length) * sizeof(T);
    if (posix_memalign(&memory_, 16, bytes) != 0) throw std::bad_alloc();
    std::memset(memory_, kFront, bytes);
  }
  Array(const Array& other, int64_t shift) : Array(other.length_, shift) {
    for (int64_t i = 0; i < length_; ++i) (*this)[i] = other[i];
  }
  Array(Array&& other) noexcept
      : length_(other.length_), shift_(other.shift_), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { std::free(memory_); }

  T* data() const { return static_cast<T*>(memory_) + shift_; }
  int64_t length() const { return length_; }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t address() const { return reinterpret_cast<int64_t>(data()); }

  bool front_intact() const {
    const auto* bytes = static_cast<const unsigned char*>(memory_);
    for (size_t i = 0; i < static_cast<size_t>(shift_) * sizeof(T); ++i) {
      if (bytes[i] != kFront) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kFront = 0xa5;
  int64_t length_;
  int64_t shift_;
  void* memory_ = nullptr;
};

template <typename T>
Array<T> random_array(Random& random, int64_t length, int64_t shift = 0) {
  Array<T> array(length, shift);
  for (int64_t i = 0; i < length; ++i) array[i] = random.value<T>();
  return array;
}

template <typename T>
void expect_same(const std::string& what, const Array<T>& actual, const Array<T>& expected) {
  for (int64_t i = 0; i < expected.length(); ++i) {
    if (same(actual[i], expected[i])) continue;
    throw std::runtime_error(what + ": element " + std::to_string(i) + " of " +
                             std::to_string(expected.length()) + " is " + text(actual[i]) +
                             ", wanted " + text(expected[i]));
  }
  if (!actual.front_intact()) throw std::runtime_error(what + ": written in front of the array");
}

// The stretches of segments, as Python cuts them.
inline std::vector<Tile> tiles_of(const std::vector<Segment>& rows) {
  std::vector<Tile> tiles;
  for (size_t s = 0; s < rows.size(); ++s) {
    for (int32_t t = 0; t * kTileElements < rows[s].length; ++t) {
      tiles.push_back({static_cast<int32_t>(s), t});
    }
  }
  tiles.shrink_to_fit();  // so that AddressSanitizer sees its end
  return tiles;
}

template <typename T>
std::string type_name() {
  if (std::is_same_v<T, BFloat16>) return "bf16";
  if (std::is_same_v<T, Half>) return "fp16";
  if (std::is_integral_v<T>) return "codes";
  return sizeof(T) == 4 ? "fp32" : "fp64";
}

template <typename T>
constexpr int64_t kWidth = 16 / static_cast<int64_t>(sizeof(T));  // elements of a vector

// Both devices, in turns: their grids differ.
inline Stream next_stream() {
  static int device = 0;
  device = 1 - device;
  return {device, nullptr};
}

}  // namespace drive
