#pragma once

#include <pybind11/pybind11.h>

namespace fusedshard {

// Adds the CUDA kernels' functions to a module.
void bind_cuda(pybind11::module_& module);

}  // namespace fusedshard
