// What the CPU loops share. Included once for each instruction set, by kernels_cpu.cpp.
#pragma once

#include <omp.h>

#include "kernels.h"

namespace fusedshard {
namespace {

// Below this many elements waking threads costs more than it saves.
constexpr int64_t kParallelGrain = 1 << 15;
// Threads meet at multiples of a cache line of the widest type, never within one.
constexpr int64_t kThreadAlign = 64;

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int useful_threads(int64_t elements, int threads) {
  const int64_t useful = larger(1, elements / kParallelGrain);
  return static_cast<int>(smaller(useful, larger(1, threads)));
}

// Element where part `index` of `parts` of [0, length) begins.
inline int64_t cut(int64_t length, int index, int parts) {
  if (index == parts) return length;
  const int64_t even = length / parts * index;
  return even - even % kThreadAlign;
}

template <typename T>
int64_t length_of(const Run<T>& run) {
  return run.length;
}

inline int64_t length_of(const MixedRun& run) { return run.segment->length; }

// Calls body(run, from, to) for elements [from, to) of runs: each thread takes one stretch of the
// runs laid end to end, whatever their number and lengths.
template <typename R, typename Body>
void for_stretches(const R* runs, int64_t run_count, int threads, const Body& body) {
  int64_t total = 0;
  for (int64_t r = 0; r < run_count; ++r) total += length_of(runs[r]);
  const int parts = useful_threads(total, threads);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int part = omp_get_thread_num();
    const int64_t begin = cut(total, part, omp_get_num_threads());
    const int64_t end = cut(total, part + 1, omp_get_num_threads());
    int64_t before = 0;
    for (int64_t r = 0; r < run_count && before < end; ++r) {
      const int64_t from = larger(begin - before, 0);
      const int64_t to = smaller(end - before, length_of(runs[r]));
      if (from < to) body(runs[r], from, to);
      before += length_of(runs[r]);
    }
  }
}

template <typename T, bool kAmsgrad>
void adam_loop(T* __restrict p, const T* __restrict g, T* __restrict m, T* __restrict v,
               T* __restrict vmax, int64_t length, const AdamScalars<T>& scalars) {
  const AdamScalars<T> s = scalars;
  for (int64_t i = 0; i < length; ++i) {
    adam_decay_and_moments(p[i], g[i], m[i], v[i], s);
    if (kAmsgrad) vmax[i] = adam_maximum(vmax[i], v[i]);
    adam_move(p[i], m[i], kAmsgrad ? vmax[i] : v[i], s);
  }
}

}  // namespace
}  // namespace fusedshard
