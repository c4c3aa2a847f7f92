// Stands in for CUDA's header of this name where a host compiler builds the kernels: what they use
// of CUDA C++ and of the runtime, and no more. Beside it stands emulation.h, for the tests.
#pragma once

#include <math.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#define __global__
// Inlined all of it, as nvcc does: GCC's ThreadSanitizer does not see `shared = function()` as a
// write unless the function is inlined.
#define __device__ inline __attribute__((always_inline))
#define __host__
#define __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
// One block runs at a time, so one copy of its shared memory will do. rewrite.py adds the calls of
// emulation::enter_shared().
#define __shared__ static

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

extern uint3 threadIdx, blockIdx;
extern dim3 gridDim;

// With CUDA's numbers.
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};

struct cudaFuncAttributes {};
using cudaStream_t = struct CUstream_st*;

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream);

namespace emulation {

// Where in the sources a call stands.
struct Where {
  const char* file;
  int line;
};

// The threads of a block meet: whether any of them brought a value other than 0.
bool meet_block(bool value, const char* name, Where where);

constexpr unsigned kWarp = 32;

// The threads of a warp that `mask` names meet: the bits that lane `source` brought, and the
// thread's own bits where there is no such lane.
uint64_t shuffle(unsigned mask, uint64_t bits, unsigned source, const char* name, Where where);

// All threads of a warp meet; what they wrote before the others may read after.
void meet_warp(const char* name, Where where);

// Fills shared memory with 0xff (NaN, or a wild pointer) as the first thread of a block comes by:
// on a device it holds anything. `epoch`: the block that it was last filled for.
void enter_shared(uint64_t& epoch, void* memory, size_t bytes);

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const std::function<void()>& body);
cudaError_t occupancy(int* blocks, int threads);
cudaError_t kernel_image();

template <typename... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<P*>(arguments[I])...);
}

}  // namespace emulation

template <typename... P>
cudaError_t cudaLaunchKernel(void (*kernel)(P...), dim3 grid, dim3 block, void** arguments,
                             size_t /*dynamic_shared*/, cudaStream_t stream) {
  static_assert((0 + ... + sizeof(P)) <= 4096, "more arguments than every device takes");
  return emulation::launch(grid, block, stream, [=] {
    emulation::call(kernel, arguments, std::index_sequence_for<P...>());
  });
}

template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int threads,
                                                          size_t /*dynamic_shared*/) {
  return emulation::occupancy(blocks, threads);
}

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return emulation::kernel_image();
}

template <typename T>
inline __attribute__((always_inline)) void __stwb(T* to, const T& value) {
  *to = value;
}

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::meet_block(false, "__syncthreads", {file, line});
}

inline int __syncthreads_or(int value, const char* file = __builtin_FILE(),
                            int line = __builtin_LINE()) {
  return emulation::meet_block(value != 0, "__syncthreads_or", {file, line});
}

inline void __syncwarp(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::meet_warp("__syncwarp", {file, line});
}

namespace emulation {

template <typename T>
T shuffle_value(unsigned mask, T value, unsigned source, const char* name, Where where) {
  static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source, name, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline unsigned lane() { return threadIdx.x % kWarp; }

}  // namespace emulation

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, const char* file = __builtin_FILE(),
                   int line = __builtin_LINE()) {
  const unsigned source = emulation::lane() + delta;
  return emulation::shuffle_value(mask, value, source, "__shfl_down_sync", {file, line});
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  const unsigned source = emulation::lane() ^ bits;
  return emulation::shuffle_value(mask, value, source, "__shfl_xor_sync", {file, line});
}
