#include <cuda_runtime.h>

#include "device.h"

namespace fusedshard {
namespace {

__global__ void probe_kernel() {}

std::string cuda_version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

bool cuda_built() { return true; }
std::string cuda_architectures() { return FUSEDSHARD_CUDA_ARCHITECTURES; }
std::string cuda_build_note() { return ""; }

int cuda_runtime_version() {
  int version = 0;
  // Needs no driver: the runtime is linked statically.
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string cuda_device_problem(int device) {
  int before = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    // Fails where no machine code of the module runs on the device and its PTX is too new for it.
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, probe_kernel);
    cudaSetDevice(before);
  }
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // else the next launch would report it once more
  if (error == cudaErrorInsufficientDriver) {
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return "its driver knows CUDA " + cuda_version(driver) + ", and this build was made with " +
           cuda_version(cuda_runtime_version()) +
           ": update the driver, or rebuild with CUDA_HOME set to a toolkit that it knows";
  }
  const std::string reason = cudaGetErrorString(error);
  if (major == 0) return reason;
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  return "it has compute capability " + capability + ", and this build holds code for " +
         cuda_architectures() + " (" + reason +
         "): rebuild with TORCH_CUDA_ARCH_LIST=" + capability;
}

}  // namespace fusedshard
