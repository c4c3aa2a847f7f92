// The part of the CUDA runtime that the sources call: two devices in host memory, on which work is
// done before the call that queues it returns.
#include <cstdlib>
#include <mutex>

#include "block.h"
#include "emulation.h"

namespace emulation {
namespace {

// Few and different numbers of blocks at once, so that grids stride over their work, and a grid
// for the wrong device shows.
constexpr int kDevices = 2;
constexpr int kProcessors[kDevices] = {3, 2};
constexpr int kBlocksEach = 2;
constexpr unsigned kMaxThreads = 1024;  // of a block

// One grid runs at a time, whatever the number of the process's threads that launch.
std::mutex mutex;
Launch last{};
int64_t count = 0;
cudaError_t next_error = cudaSuccess;
cudaError_t image_error = cudaSuccess;
thread_local int current_device = 0;
thread_local cudaError_t thread_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) thread_error = error;
  return error;
}

bool exists(int device) { return device >= 0 && device < kDevices; }

// Notes a launch; whether it shall fail. Call with the mutex held.
cudaError_t enqueue(cudaStream_t stream, unsigned blocks) {
  last = {current_device, stream, blocks};
  ++count;
  return std::exchange(next_error, cudaSuccess);
}

}  // namespace

Launch last_launch() {
  const std::lock_guard<std::mutex> lock(mutex);
  return last;
}

int64_t launch_count() {
  const std::lock_guard<std::mutex> lock(mutex);
  return count;
}

void set_launch_error(cudaError_t error) {
  const std::lock_guard<std::mutex> lock(mutex);
  next_error = error;
}

void set_kernel_image_error(cudaError_t error) {
  const std::lock_guard<std::mutex> lock(mutex);
  image_error = error;
}

cudaError_t last_error() { return thread_error; }

cudaError_t launch(dim3 grid, dim3 block, cudaStream_t stream, const std::function<void()>& body) {
  if (grid.x == 0 || grid.y * grid.z != 1 || block.x == 0 || block.x > kMaxThreads ||
      block.y * block.z != 1) {
    return remember(cudaErrorInvalidConfiguration);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const cudaError_t error = enqueue(stream, grid.x);
  if (error != cudaSuccess) return remember(error);
  const char* seed = std::getenv("FUSEDSHARD_EMULATION_SEED");
  if (seed == nullptr || *seed == '\0') {
    run_grid(grid.x, block.x, body, nullptr);
  } else {
    std::mt19937_64 random(std::strtoull(seed, nullptr, 10) + static_cast<uint64_t>(count) * 997);
    run_grid(grid.x, block.x, body, &random);
  }
  return cudaSuccess;
}

cudaError_t occupancy(int* blocks, int threads) {
  *blocks = threads <= static_cast<int>(kMaxThreads) ? kBlocksEach : 0;
  return cudaSuccess;
}

cudaError_t kernel_image() {
  const std::lock_guard<std::mutex> lock(mutex);
  return remember(image_error);
}

}  // namespace emulation

using namespace emulation;

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kProcessors[device];
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(thread_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice:
      return "no kernel image is available for execution on the device";
  }
  return "unrecognized error code";
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 12040;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const cudaError_t error = enqueue(stream, 0);
  if (error == cudaSuccess) std::memset(to, value, bytes);
  return remember(error);
}
