#include <cuda_runtime_api.h>

#include "device.h"

namespace fusedshard {

bool cuda_built() { return true; }
std::string cuda_architectures() { return FUSEDSHARD_CUDA_ARCHITECTURES; }
std::string cuda_build_note() { return ""; }

int cuda_runtime_version() {
  int version = 0;
  // Needs no driver: the runtime is linked statically.
  return cudaRuntimeGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace fusedshard
