// As bindings.cpp, for the CUDA kernels: every call ends with the device's number and the stream.
#include "bindings_cuda.h"

#include <pybind11/stl.h>

#include "address.h"
#include "arrays.h"
#include "device.h"
#include "kernels_cuda.h"

namespace py = pybind11;

namespace fusedshard {
namespace {

Stream to_stream(int device, int64_t handle) { return {device, at<void>(handle)}; }

AdamTable to_table(int64_t rows, int64_t tiles, int64_t tile_count, int64_t steps, int64_t groups) {
  return {at<const Segment>(rows), at<const Tile>(tiles), tile_count, at<const int64_t>(steps),
          at<const Group>(groups)};
}

AdamControl to_control(double grad_scale, int64_t device_grad_scale, int64_t found_inf) {
  return {grad_scale, at<const double>(device_grad_scale), at<const float>(found_inf)};
}

template <typename T>
void adam(int64_t param, int64_t exp_avg, int64_t exp_avg_sq, int64_t max_exp_avg_sq, int64_t rows,
          int64_t tiles, int64_t tile_count, int64_t steps, int64_t groups, double grad_scale,
          int64_t device_grad_scale, int64_t found_inf, int device, int64_t stream) {
  adam_cuda<T>({at<T>(param), at<T>(exp_avg), at<T>(exp_avg_sq), at<T>(max_exp_avg_sq)},
               to_table(rows, tiles, tile_count, steps, groups),
               to_control(grad_scale, device_grad_scale, found_inf), to_stream(device, stream));
}

void adam_mixed(int64_t param, int64_t master, int64_t checks, const MomentAddresses& moments,
                const Formats& formats, int64_t seed, int64_t rows, int64_t tiles,
                int64_t tile_count, int64_t steps, int64_t groups, double grad_scale,
                int64_t device_grad_scale, int64_t found_inf, int device, int64_t stream) {
  adam_mixed_cuda(mixed_arrays(param, master, checks, moments, formats, seed),
                  to_table(rows, tiles, tile_count, steps, groups),
                  to_control(grad_scale, device_grad_scale, found_inf), to_stream(device, stream));
}

template <typename T>
void mean(int64_t out, int64_t chunks, int64_t stride, int64_t n, int64_t length, int device,
          int64_t stream) {
  mean_cuda<T>(at<Wide<T>>(out), at<const T>(chunks), stride, n, length, to_stream(device, stream));
}

template <typename T>
void square_sum(int64_t workspace, int64_t x, int64_t length, int device, int64_t stream) {
  square_sum_cuda<T>(at<double>(workspace), at<const T>(x), length, to_stream(device, stream));
}

template <typename T>
void set_found_inf(int64_t found_inf, int64_t x, int64_t length, int device, int64_t stream) {
  found_inf_cuda<T>(at<float>(found_inf), at<const T>(x), length, to_stream(device, stream));
}

template <typename T>
void refresh(int64_t wide, int64_t narrow, int64_t length, int device, int64_t stream) {
  refresh_cuda<T>(at<float>(wide), at<const T>(narrow), length, to_stream(device, stream));
}

void pack(int64_t out, int64_t rows, int64_t tiles, int64_t tile_count, int64_t numel,
          int64_t itemsize, int device, int64_t stream) {
  pack_cuda(at<char>(out), at<const Segment>(rows), at<const Tile>(tiles), tile_count, numel,
            itemsize, to_stream(device, stream));
}

void unpack(int64_t in, int64_t rows, int64_t tiles, int64_t tile_count, int64_t itemsize,
            int device, int64_t stream) {
  unpack_cuda(at<const char>(in), at<const Segment>(rows), at<const Tile>(tiles), tile_count,
              itemsize, to_stream(device, stream));
}

void fingerprints(int64_t hashes, int64_t terms, int64_t rows, int64_t row_count,
                  int64_t block_count, int device, int64_t stream) {
  fingerprints_cuda(at<uint64_t>(hashes), at<uint64_t>(terms), at<const FingerprintRow>(rows),
                    row_count, block_count, to_stream(device, stream));
}

void write_words(int64_t to, int64_t words, int64_t count, int device, int64_t stream) {
  write_words_cuda(at<int64_t>(to), at<const int64_t>(words), count, to_stream(device, stream));
}

void count_steps(int64_t steps, int64_t step_mirror, int64_t used, int64_t count, int64_t found_inf,
                 int device, int64_t stream) {
  count_steps_cuda(at<int64_t>(steps), at<float>(step_mirror), at<const int64_t>(used), count,
                   at<const float>(found_inf), to_stream(device, stream));
}

// A launch waits where the stream's queue is full.
const py::call_guard<py::gil_scoped_release> released;

template <typename T>
void def_reductions(py::module_& module, const std::string& suffix) {
  module.def(("mean_" + suffix).c_str(), &mean<T>, released);
  module.def(("square_sum_" + suffix).c_str(), &square_sum<T>, released);
  module.def(("found_inf_" + suffix).c_str(), &set_found_inf<T>, released);
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.attr("TILE_ELEMENTS") = kTileElements;
  module.def("device_problem", &cuda_device_problem);
  module.def("square_sum_workspace", &square_sum_workspace);
  module.def("adam_f32", &adam<float>, released);
  module.def("adam_f64", &adam<double>, released);
  module.def("adam_mixed", &adam_mixed, released);
  def_reductions<float>(module, "f32");
  def_reductions<double>(module, "f64");
  def_reductions<BFloat16>(module, "bf16");
  def_reductions<Half>(module, "f16");
  module.def("refresh_bf16", &refresh<BFloat16>, released);
  module.def("refresh_f16", &refresh<Half>, released);
  module.def("pack", &pack, released);
  module.def("unpack", &unpack, released);
  module.def("fingerprints", &fingerprints, released);
  module.def("write_words", &write_words, released);
  module.def("count_steps", &count_steps, released);
}

}  // namespace fusedshard
