#include "dispatch_cpu.h"

#include <cstdlib>
#include <stdexcept>
#include <type_traits>

namespace fusedshard {

extern const CpuKernels cpu_kernels_baseline;
#if defined(FUSEDSHARD_HAVE_AVX2)
extern const CpuKernels cpu_kernels_avx2;
#endif
#if defined(FUSEDSHARD_HAVE_AVX512)
extern const CpuKernels cpu_kernels_avx512;
#endif

namespace {

// In order of preference, the preferred one last: benchmarks/bench_kernel.py --isa measures it.
std::vector<const CpuKernels*> runnable() {
  std::vector<const CpuKernels*> kernels = {&cpu_kernels_baseline};
#if defined(FUSEDSHARD_HAVE_AVX2)
  kernels.push_back(&cpu_kernels_avx2);
#endif
#if defined(FUSEDSHARD_HAVE_AVX512)
  kernels.push_back(&cpu_kernels_avx512);
#endif
  std::vector<const CpuKernels*> result;
  for (const CpuKernels* k : kernels) {
    if (k->supported()) result.push_back(k);
  }
  return result;
}

const CpuKernels* find(const std::string& what, const std::string& name) {
  std::string known;
  for (const CpuKernels* k : runnable()) {
    if (name == k->name) return k;
    known += std::string(known.empty() ? "" : ", ") + k->name;
  }
  throw std::invalid_argument(what + ": got '" + name + "', this processor runs " + known);
}

const CpuKernels*& current() {
  static const CpuKernels* kernels = [] {
    const char* name = "FUSEDSHARD_CPU_ISA";
    const char* wanted = std::getenv(name);
    return wanted != nullptr && *wanted != '\0' ? find(name, wanted) : runnable().back();
  }();
  return kernels;
}

template <typename T>
const ReduceKernels<T>& reductions() {
  if constexpr (std::is_same_v<T, float>) {
    return current()->reduce_f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return current()->reduce_f64;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return current()->reduce_bf16;
  } else {
    return current()->reduce_f16;
  }
}

template <typename T>
bool continues(const Run<T>& run, const Segment& segment) {
  return run.start + run.length == segment.start &&
         reinterpret_cast<const T*>(segment.grad) == run.grad + run.length;
}

template <typename T>
std::vector<Run<T>> merge_runs(const Segment* segments, int64_t count, const int64_t* steps,
                               const Group* groups, double grad_scale) {
  std::vector<Run<T>> runs;
  int64_t run_step = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Segment& segment = segments[i];
    if (segment.active == 0 || segment.length == 0) continue;
    const Group* group = groups + segment.group;
    const int64_t step = steps[segment.param] + 1;
    if (!runs.empty() && runs.back().group == group && step == run_step &&
        continues(runs.back(), segment)) {
      runs.back().length += segment.length;
      continue;
    }
    run_step = step;
    runs.push_back({segment.start, segment.length, reinterpret_cast<const T*>(segment.grad), group,
                    adam_scalars<T>(*group, step, grad_scale)});
  }
  return runs;
}

}  // namespace

std::vector<std::string> cpu_variants() {
  std::vector<std::string> names;
  for (const CpuKernels* k : runnable()) names.emplace_back(k->name);
  return names;
}

std::string cpu_variant() { return current()->name; }

void set_cpu_variant(const std::string& name) { current() = find("CPU kernel variant", name); }

template <typename T>
void adam_cpu(const AdamArrays<T>& arrays, const Segment* segments, int64_t segment_count,
              const int64_t* steps, const Group* groups, double grad_scale, int threads) {
  const std::vector<Run<T>> runs =
      merge_runs<T>(segments, segment_count, steps, groups, grad_scale);
  const int64_t count = static_cast<int64_t>(runs.size());
  if constexpr (std::is_same_v<T, float>) {
    current()->adam_f32(arrays, runs.data(), count, threads);
  } else {
    current()->adam_f64(arrays, runs.data(), count, threads);
  }
}

void adam_mixed_cpu(const MixedArrays& arrays, const Segment* segments, int64_t segment_count,
                    const int64_t* steps, const Group* groups, double grad_scale, int threads) {
  std::vector<MixedRun> runs;
  for (const Segment* segment = segments; segment < segments + segment_count; ++segment) {
    if (segment->active == 0 || segment->length == 0) continue;
    const Group* group = groups + segment->group;
    const int64_t step = steps[segment->param] + 1;
    runs.push_back({segment, group, adam_scalars<float>(*group, step, grad_scale),
                    random_key(arrays.seed, step, segment->param)});
  }
  current()->adam_mixed(arrays, runs.data(), static_cast<int64_t>(runs.size()), threads);
}

template <typename T>
void mean_cpu(Wide<T>* out, const std::vector<const T*>& chunks, int64_t length, int threads) {
  reductions<T>().mean(out, chunks.data(), static_cast<int>(chunks.size()), length, threads);
}

template <typename T>
double square_sum_cpu(const T* x, int64_t length, int threads) {
  const auto blocks = [](int64_t n) {
    return static_cast<size_t>((n + kSumBlock - 1) / kSumBlock);
  };
  std::vector<double> sums(blocks(length));
  reductions<T>().square_partials(sums.data(), x, length, threads);
  while (sums.size() > 1) {
    const int64_t count = static_cast<int64_t>(sums.size());
    std::vector<double> fewer(blocks(count));
    current()->partials(fewer.data(), sums.data(), count, threads);
    sums.swap(fewer);
  }
  return sums.empty() ? 0.0 : sums[0];
}

template <typename T>
bool non_finite_cpu(const T* x, int64_t length, int threads) {
  return reductions<T>().non_finite(x, length, threads);
}

template <typename T>
void refresh_cpu(float* wide, const T* narrow, int64_t length, int threads) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    current()->refresh_bf16(wide, narrow, length, threads);
  } else {
    current()->refresh_f16(wide, narrow, length, threads);
  }
}

void fingerprints_cpu(uint64_t* hashes, const FingerprintRow* rows, int64_t row_count,
                      int threads) {
  current()->fingerprints(hashes, rows, row_count, threads);
}

void roofline_cpu(float* p, const float* g, float* m, float* v, int64_t length, int threads) {
  current()->roofline_f32(p, g, m, v, length, threads);
}

template void adam_cpu(const AdamArrays<float>&, const Segment*, int64_t, const int64_t*,
                       const Group*, double, int);
template void adam_cpu(const AdamArrays<double>&, const Segment*, int64_t, const int64_t*,
                       const Group*, double, int);
#define FUSEDSHARD_REDUCTIONS(T)                                                   \
  template void mean_cpu<T>(Wide<T>*, const std::vector<const T*>&, int64_t, int); \
  template double square_sum_cpu<T>(const T*, int64_t, int);                       \
  template bool non_finite_cpu<T>(const T*, int64_t, int)
FUSEDSHARD_REDUCTIONS(float);
FUSEDSHARD_REDUCTIONS(double);
FUSEDSHARD_REDUCTIONS(BFloat16);
FUSEDSHARD_REDUCTIONS(Half);
template void refresh_cpu(float*, const BFloat16*, int64_t, int);
template void refresh_cpu(float*, const Half*, int64_t, int);

}  // namespace fusedshard
