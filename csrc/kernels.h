// What a caller can ask of the kernels, free of torch and pybind11.
#pragma once

#include <cstdint>

#include "adam.h"
#include "fingerprint.h"
#include "random.h"

namespace fusedshard {

// A row of the segment table: elements [start, start + length) of the flat arrays belong to one
// parameter. The layout is fixed, since Python hands the table over as an int64 array (n, 8).
struct Segment {
  int64_t start;
  int64_t length;
  int64_t grad;    // address of the gradient of element `start`
  int64_t active;  // 0: no rank has a gradient, leave everything as it is
  int64_t param;   // index into the step counts
  int64_t group;   // index into the groups
  int64_t first;   // number of element `start` in the parameter's storage order
  int64_t wide;    // 1: the gradient is fp32 although the parameter is narrower
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

// How a number lies in memory.
enum class Format : int32_t {
  kNone,       // not at all
  kFloat,      // fp32
  kBFloat16,   // bf16
  kHalf,       // fp16
  kRemainder,  // int16 beside a bf16 parameter, see split_master
  kCode,       // uint8 beside an exponent for each block of kCodeBlock elements
};

// A moment of a shard in mixed precision.
struct Moment {
  void* values;
  uint8_t* exponents;  // of codes; else null
};

// The flat arrays of a shard in mixed precision: the arithmetic is fp32, and each array is read and
// written once in its own format.
struct MixedArrays {
  void* param;
  void* master;
  uint32_t* checks;  // of remainders, one for each block of kCodeBlock elements; else null
  Moment exp_avg;
  Moment exp_avg_sq;
  Moment max_exp_avg_sq;  // null without amsgrad
  Format param_format;    // kFloat, kBFloat16 or kHalf
  Format master_format;   // kNone, kFloat or kRemainder
  Format moment_format;   // kFloat, kBFloat16 or kCode
  // Whether bf16 and coded moments, and bf16 parameters without a master, are rounded up or down at
  // random (see random.h) rather than to the nearest.
  int32_t stochastic;
  int64_t seed;
};

// A segment as the CPU loops see it.
struct MixedRun {
  const Segment* segment;
  const Group* group;
  AdamScalars<float> scalars;
  RandomKey random;
};

// Elements a partial sum covers, and the lanes it is summed in: four for each thread of a warp.
// Fixed, so that the order of additions is the same for every thread count, instruction set and
// device. Partial sums are summed in the same way, until one is left.
constexpr int64_t kSumBlock = 4096;
constexpr int kSumLanes = 128;

// What T is computed with.
template <typename T>
using Wide = decltype(widen(T{}));

// Loops over gradients as they are sent.
template <typename T>
struct ReduceKernels {
  // out[i] = (chunks[0][i] + ... + chunks[n - 1][i]) / n, added in that order; out may be
  // chunks[k] for any k where that is of its type.
  void (*mean)(Wide<T>* out, const T* const* chunks, int n, int64_t length, int threads);
  // partials[b] = sum of squares of block b of kSumBlock elements.
  void (*square_partials)(double* partials, const T* x, int64_t length, int threads);
  // Whether any element is infinite or NaN.
  bool (*non_finite)(const T* x, int64_t length, int threads);
};

// One table of loops for each instruction set that was compiled in.
struct CpuKernels {
  const char* name;
  bool (*supported)();
  void (*adam_f32)(const AdamArrays<float>&, const Run<float>*, int64_t runs, int threads);
  void (*adam_f64)(const AdamArrays<double>&, const Run<double>*, int64_t runs, int threads);
  void (*adam_mixed)(const MixedArrays&, const MixedRun*, int64_t runs, int threads);
  ReduceKernels<float> reduce_f32;
  ReduceKernels<double> reduce_f64;
  ReduceKernels<BFloat16> reduce_bf16;
  ReduceKernels<Half> reduce_f16;
  // wide[i] = refreshed(wide[i], narrow[i])
  void (*refresh_bf16)(float* wide, const BFloat16* narrow, int64_t length, int threads);
  void (*refresh_f16)(float* wide, const Half* narrow, int64_t length, int threads);
  // Partial sums of partial sums.
  void (*partials)(double* partials, const double* x, int64_t length, int threads);
  // hashes[r] = the fingerprint of row r.
  void (*fingerprints)(uint64_t* hashes, const FingerprintRow* rows, int64_t row_count,
                       int threads);
  // The floor of an update's time, for benchmarks: reads four arrays and writes three in place.
  void (*roofline_f32)(float* p, const float* g, float* m, float* v, int64_t length, int threads);
};

}  // namespace fusedshard
