// The Python module fusedshard_emulated: what fusedshard._C.cuda is in a build with CUDA, and a
// submodule `emulation` for tests.
#include <pybind11/pybind11.h>

#include <tuple>

#include "bindings_cuda.h"
#include "emulation.h"

namespace py = pybind11;

PYBIND11_MODULE(fusedshard_emulated, module) {
  fusedshard::bind_cuda(module);
  py::module_ control = module.def_submodule("emulation");
  control.def("last_launch", [] {
    const emulation::Launch last = emulation::last_launch();
    return py::make_tuple(last.device, reinterpret_cast<uintptr_t>(last.stream), last.blocks);
  });
  control.def("launch_count", &emulation::launch_count);
  control.def("set_launch_error",
              [](int error) { emulation::set_launch_error(static_cast<cudaError_t>(error)); });
  control.def("set_kernel_image_error", [](int error) {
    emulation::set_kernel_image_error(static_cast<cudaError_t>(error));
  });
  control.def("last_error", [] { return static_cast<int>(emulation::last_error()); });
  control.def("current_device", [] {
    int device = 0;
    cudaGetDevice(&device);
    return device;
  });
  control.def("set_device", [](int device) { return static_cast<int>(cudaSetDevice(device)); });
}
