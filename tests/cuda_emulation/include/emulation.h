// What tests see and steer of the emulated devices.
#pragma once

#include <cuda_runtime.h>

namespace emulation {

// What was last put on a stream; a memset is one of no blocks.
struct Launch {
  int device;  // that was the current one
  cudaStream_t stream;
  unsigned blocks;
};
Launch last_launch();
int64_t launch_count();

// The next launch or memset does nothing but return this error.
void set_launch_error(cudaError_t error);

// What asking for a kernel's machine code returns.
void set_kernel_image_error(cudaError_t error);

// What cudaGetLastError would return, without forgetting it.
cudaError_t last_error();

}  // namespace emulation
