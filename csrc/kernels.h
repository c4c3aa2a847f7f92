// What a caller can ask of the kernels, free of torch and pybind11.
#pragma once

#include <cstdint>

#include "adam.h"

namespace fusedshard {

// A row of the segment table: elements [start, start + length) of the flat arrays belong to one
// parameter. The layout is fixed, since Python hands the table over as an int64 array (n, 6).
struct Segment {
  int64_t start;
  int64_t length;
  int64_t grad;    // address of the gradient of element `start`
  int64_t active;  // 0: no rank has a gradient, leave everything as it is
  int64_t param;   // index into the step counts
  int64_t group;   // index into the groups
};

// On a device a thread block takes a stretch of one segment at a time: number `index` of those
// that `segment` is cut into. Python hands them over as an int32 array (n, 2).
struct Tile {
  int32_t segment;
  int32_t index;
};
constexpr int64_t kTileElements = 4096;

// Neighbouring active segments that need the same scalars and whose gradients are contiguous,
// as one: the CPU loops see few long runs instead of many short segments.
template <typename T>
struct Run {
  int64_t start;
  int64_t length;
  const T* grad;
  const Group* group;
  AdamScalars<T> scalars;
};

// The four (or with amsgrad five) flat arrays of a shard.
template <typename T>
struct AdamArrays {
  T* param;
  T* exp_avg;
  T* exp_avg_sq;
  T* max_exp_avg_sq;  // null without amsgrad
};

// Elements a partial sum covers, and the lanes it is summed in: four for each thread of a warp.
// Fixed, so that the order of additions is the same for every thread count, instruction set and
// device. Partial sums are summed in the same way, until one is left.
constexpr int64_t kSumBlock = 4096;
constexpr int kSumLanes = 128;

// One table of loops for each instruction set that was compiled in.
struct CpuKernels {
  const char* name;
  bool (*supported)();
  void (*adam_f32)(const AdamArrays<float>&, const Run<float>*, int64_t runs, int threads);
  void (*adam_f64)(const AdamArrays<double>&, const Run<double>*, int64_t runs, int threads);
  // out[i] = (chunks[0][i] + ... + chunks[n - 1][i]) / n, added in that order; out may be
  // chunks[k] for any k.
  void (*mean_f32)(float* out, const float* const* chunks, int n, int64_t length, int threads);
  void (*mean_f64)(double* out, const double* const* chunks, int n, int64_t length, int threads);
  // partials[b] = sum (of squares) of block b of kSumBlock elements.
  void (*square_partials_f32)(double* partials, const float* x, int64_t length, int threads);
  void (*square_partials_f64)(double* partials, const double* x, int64_t length, int threads);
  void (*partials)(double* partials, const double* x, int64_t length, int threads);
  // Whether any element is infinite or NaN.
  bool (*non_finite_f32)(const float* x, int64_t length, int threads);
  bool (*non_finite_f64)(const double* x, int64_t length, int threads);
  // The floor of an update's time, for benchmarks: reads four arrays and writes three in place.
  void (*roofline_f32)(float* p, const float* g, float* m, float* v, int64_t length, int threads);
};

}  // namespace fusedshard
