// What this build knows about CUDA. Defined in device_cuda.cu where nvcc was found, otherwise in
// device_none.cpp.
#pragma once

#include <string>

namespace fusedshard {

bool cuda_built();
std::string cuda_architectures();  // in CMake's notation, separated by blanks
int cuda_runtime_version();        // as cudaRuntimeGetVersion: 13000 for 13.0; 0 without CUDA
std::string cuda_build_note();     // why the CUDA part was left out; empty where it was built
// Why this build's kernels cannot run on a device, or empty. Only where the CUDA part was built.
std::string cuda_device_problem(int device);

}  // namespace fusedshard
