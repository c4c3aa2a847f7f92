// The CPU loops. CMake compiles this file once for each instruction set, with FUSEDSHARD_ISA set
// to its name; dispatch_cpu.cpp picks one at run time. Plain loops that the compiler vectorizes:
// the arithmetic is element-wise IEEE without contraction, so every variant gives the same bits.
//
// No function of the C++ library that could be emitted out of line may be used here (see adam.h).
#include <omp.h>

#include "fingerprint_cpu.h"
#include "kernels.h"
#include "loops_cpu.h"
#include "mixed_cpu.h"

#if defined(__AVX512F__)
#define FUSEDSHARD_SUPPORTED                                                  \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && \
   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
#elif defined(__AVX2__)
#define FUSEDSHARD_SUPPORTED __builtin_cpu_supports("avx2")
#else
#define FUSEDSHARD_SUPPORTED true
#endif

#define FUSEDSHARD_STRING(x) FUSEDSHARD_STRING_(x)
#define FUSEDSHARD_STRING_(x) #x
#define FUSEDSHARD_CONCAT(a, b) FUSEDSHARD_CONCAT_(a, b)
#define FUSEDSHARD_CONCAT_(a, b) a##b

namespace fusedshard {
namespace {

template <typename T>
void adam_range(const AdamArrays<T>& a, const Run<T>& run, int64_t from, int64_t to) {
  const int64_t at = run.start + from;
  const bool amsgrad = run.group->amsgrad != 0.0;
  T* vmax = amsgrad ? a.max_exp_avg_sq + at : nullptr;
  const auto loop = amsgrad ? adam_loop<T, true> : adam_loop<T, false>;
  loop(a.param + at, run.grad + from, a.exp_avg + at, a.exp_avg_sq + at, vmax, to - from,
       run.scalars);
}

template <typename T>
void adam(const AdamArrays<T>& arrays, const Run<T>* runs, int64_t run_count, int threads) {
  for_stretches(runs, run_count, threads, [&](const Run<T>& run, int64_t from, int64_t to) {
    adam_range(arrays, run, from, to);
  });
}

// Summed in pieces that stay in the first-level cache, so that each chunk is read once from
// memory and the result is written once. Buffered, since `out` may be one of the chunks.
template <typename T>
void mean_range(Wide<T>* out, const T* const* chunks, int n, int64_t begin, int64_t end) {
  constexpr int64_t kPiece = 1024;
  alignas(64) Wide<T> sum[kPiece];
  const auto divisor = static_cast<Wide<T>>(n);
  for (int64_t at = begin; at < end; at += kPiece) {
    const int64_t length = smaller(kPiece, end - at);
    for (int64_t i = 0; i < length; ++i) sum[i] = widen(chunks[0][at + i]);
    for (int c = 1; c < n; ++c) {
      const T* chunk = chunks[c] + at;
      for (int64_t i = 0; i < length; ++i) sum[i] += widen(chunk[i]);
    }
    for (int64_t i = 0; i < length; ++i) out[at + i] = sum[i] / divisor;
  }
}

template <typename T>
void mean(Wide<T>* out, const T* const* chunks, int n, int64_t length, int threads) {
  const int parts = useful_threads(length, threads);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int part = omp_get_thread_num();
    mean_range(out, chunks, n, cut(length, part, omp_get_num_threads()),
               cut(length, part + 1, omp_get_num_threads()));
  }
}

// A block's elements go round the lanes, then the lanes fold in halves.
template <typename T, bool kSquare>
double sum_block(const T* x, int64_t length) {
  double lanes[kSumLanes] = {};
  const auto add = [&](int64_t i, int lane) {
    const double value = widen(x[i + lane]);
    lanes[lane] += kSquare ? value * value : value;
  };
  int64_t i = 0;
  for (; i + kSumLanes <= length; i += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) add(i, lane);
  }
  for (int lane = 0; i + lane < length; ++lane) add(i, lane);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <typename T, bool kSquare>
void partial_sums(double* partials, const T* x, int64_t length, int threads) {
  const int64_t blocks = (length + kSumBlock - 1) / kSumBlock;
  const int parts = useful_threads(length, threads);
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1)
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * kSumBlock;
    partials[b] = sum_block<T, kSquare>(x + at, smaller(kSumBlock, length - at));
  }
}

template <typename T>
bool any_non_finite(const T* x, int64_t length, int threads) {
  const int parts = useful_threads(length, threads);
  int found = 0;
#pragma omp parallel for schedule(static) num_threads(parts) if (parts > 1) reduction(| : found)
  for (int64_t i = 0; i < length; ++i) found |= non_finite(widen(x[i]));
  return found != 0;
}

template <typename T>
void refresh(float* wide, const T* narrow, int64_t length, int threads) {
  const int parts = useful_threads(length, threads);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int64_t at = cut(length, omp_get_thread_num(), omp_get_num_threads());
    const int64_t end = cut(length, omp_get_thread_num() + 1, omp_get_num_threads());
    refresh_all(wide + at, narrow + at, end - at);
  }
}

void roofline_range(float* __restrict p, const float* __restrict g, float* __restrict m,
                    float* __restrict v, int64_t length) {
  for (int64_t i = 0; i < length; ++i) {
    p[i] += g[i];
    m[i] += g[i];
    v[i] += g[i];
  }
}

void roofline(float* p, const float* g, float* m, float* v, int64_t length, int threads) {
  const int parts = useful_threads(length, threads);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int64_t at = cut(length, omp_get_thread_num(), omp_get_num_threads());
    const int64_t end = cut(length, omp_get_thread_num() + 1, omp_get_num_threads());
    roofline_range(p + at, g + at, m + at, v + at, end - at);
  }
}

template <typename T>
constexpr ReduceKernels<T> reduce_kernels() {
  return {mean<T>, partial_sums<T, true>, any_non_finite<T>};
}

bool supported() { return FUSEDSHARD_SUPPORTED; }

}  // namespace

extern const CpuKernels FUSEDSHARD_CONCAT(cpu_kernels_, FUSEDSHARD_ISA);
const CpuKernels FUSEDSHARD_CONCAT(cpu_kernels_, FUSEDSHARD_ISA) = {
    FUSEDSHARD_STRING(FUSEDSHARD_ISA),
    supported,
    adam<float>,
    adam<double>,
    adam_mixed,
    reduce_kernels<float>(),
    reduce_kernels<double>(),
    reduce_kernels<BFloat16>(),
    reduce_kernels<Half>(),
    refresh<BFloat16>,
    refresh<Half>,
    partial_sums<double, false>,
    fingerprints,
    roofline};

}  // namespace fusedshard
