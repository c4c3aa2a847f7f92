#include "device.h"

namespace fusedshard {

bool cuda_built() { return false; }
std::string cuda_architectures() { return ""; }
int cuda_runtime_version() { return 0; }
std::string cuda_build_note() { return FUSEDSHARD_CUDA_NOTE; }

}  // namespace fusedshard
