// Python sees addresses and counts only: fusedshard/kernels.py checks the tensors behind them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "address.h"
#include "arrays.h"
#include "bindings_cuda.h"
#include "device.h"
#include "dispatch_cpu.h"
#include "flat_memory.h"
#include "pack_cpu.h"

namespace py = pybind11;
using namespace fusedshard;

namespace {

template <typename T>
void adam(int64_t param, int64_t exp_avg, int64_t exp_avg_sq, int64_t max_exp_avg_sq,
          int64_t segments, int64_t segment_count, int64_t steps, int64_t groups, double grad_scale,
          int threads) {
  py::gil_scoped_release release;
  adam_cpu<T>({at<T>(param), at<T>(exp_avg), at<T>(exp_avg_sq), at<T>(max_exp_avg_sq)},
              at<const Segment>(segments), segment_count, at<const int64_t>(steps),
              at<const Group>(groups), grad_scale, threads);
}

// moments: exp_avg, exp_avg_sq and max_exp_avg_sq, each values and exponents.
void adam_mixed(int64_t param, int64_t master, int64_t checks, const MomentAddresses& moments,
                const Formats& formats, int64_t seed, int64_t segments, int64_t segment_count,
                int64_t steps, int64_t groups, double grad_scale, int threads) {
  const MixedArrays arrays = mixed_arrays(param, master, checks, moments, formats, seed);
  py::gil_scoped_release release;
  adam_mixed_cpu(arrays, at<const Segment>(segments), segment_count, at<const int64_t>(steps),
                 at<const Group>(groups), grad_scale, threads);
}

template <typename T>
void mean(int64_t out, const std::vector<int64_t>& chunks, int64_t length, int threads) {
  std::vector<const T*> pointers;
  for (int64_t chunk : chunks) pointers.push_back(at<const T>(chunk));
  py::gil_scoped_release release;
  mean_cpu<T>(at<Wide<T>>(out), pointers, length, threads);
}

template <typename T>
double square_sum(int64_t x, int64_t length, int threads) {
  py::gil_scoped_release release;
  return square_sum_cpu<T>(at<const T>(x), length, threads);
}

template <typename T>
bool any_non_finite(int64_t x, int64_t length, int threads) {
  py::gil_scoped_release release;
  return non_finite_cpu<T>(at<const T>(x), length, threads);
}

template <typename T>
void refresh(int64_t wide, int64_t narrow, int64_t length, int threads) {
  py::gil_scoped_release release;
  refresh_cpu<T>(at<float>(wide), at<const T>(narrow), length, threads);
}

void pack(int64_t out, int64_t rows, int64_t row_count, int64_t numel, int64_t itemsize,
          int threads) {
  py::gil_scoped_release release;
  pack_cpu(at<char>(out), at<const Segment>(rows), row_count, numel, itemsize, threads);
}

void unpack(int64_t in, int64_t rows, int64_t row_count, int64_t numel, int64_t itemsize,
            int threads) {
  py::gil_scoped_release release;
  unpack_cpu(at<const char>(in), at<const Segment>(rows), row_count, numel, itemsize, threads);
}

void fingerprints(int64_t hashes, int64_t rows, int64_t row_count, int threads) {
  py::gil_scoped_release release;
  fingerprints_cpu(at<uint64_t>(hashes), at<const FingerprintRow>(rows), row_count, threads);
}

template <typename T>
void def_reductions(py::module_& module, const std::string& suffix) {
  module.def(("mean_" + suffix).c_str(), &mean<T>);
  module.def(("square_sum_" + suffix).c_str(), &square_sum<T>);
  module.def(("non_finite_" + suffix).c_str(), &any_non_finite<T>);
}

void roofline(int64_t p, int64_t g, int64_t m, int64_t v, int64_t length, int threads) {
  py::gil_scoped_release release;
  roofline_cpu(at<float>(p), at<const float>(g), at<float>(m), at<float>(v), length, threads);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.def("cpu_variants", &cpu_variants);
  module.def("cpu_variant", &cpu_variant);
  module.def("set_cpu_variant", &set_cpu_variant);
  module.def("adam_f32", &adam<float>);
  module.def("adam_f64", &adam<double>);
  module.attr("CODE_BLOCK") = kCodeBlock;
  module.def("adam_mixed", &adam_mixed);
  def_reductions<float>(module, "f32");
  def_reductions<double>(module, "f64");
  def_reductions<BFloat16>(module, "bf16");
  def_reductions<Half>(module, "f16");
  module.def("refresh_bf16", &refresh<BFloat16>);
  module.def("refresh_f16", &refresh<Half>);
  module.def("pack", &pack);
  module.def("unpack", &unpack);
  module.attr("FINGERPRINT_BLOCK") = kFingerprintBlock;
  module.def("fingerprints", &fingerprints);
  module.def("roofline_f32", &roofline);
  module.def("cuda_build", [] {
    py::dict info;
    info["built"] = cuda_built();
    info["architectures"] = cuda_architectures();
    info["runtime_version"] = cuda_runtime_version();
    info["note"] = cuda_build_note();
    return info;
  });
#if defined(FUSEDSHARD_HAVE_CUDA)
  py::module_ cuda = module.def_submodule("cuda");
  bind_cuda(cuda);
#endif
  py::class_<FlatMemory>(module, "FlatMemory", py::buffer_protocol())
      .def(py::init<int64_t>())
      .def_property_readonly(
          "address", [](const FlatMemory& m) { return reinterpret_cast<int64_t>(m.data()); })
      .def_buffer([](const FlatMemory& m) {
        return py::buffer_info(static_cast<uint8_t*>(m.data()), m.bytes());
      });
}
