// Entry points of the CPU kernels: pick the instruction set, prepare the runs, finish the sums.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace fusedshard {

// Names of the variants that this build holds and this processor can run, best last.
std::vector<std::string> cpu_variants();

// The variant in use. FUSEDSHARD_CPU_ISA names another one at load time.
std::string cpu_variant();

// Throws std::invalid_argument when the variant is not among cpu_variants().
void set_cpu_variant(const std::string& name);

// steps holds the count of each parameter before this update, which leaves it as it is.
template <typename T>
void adam_cpu(const AdamArrays<T>& arrays, const Segment* segments, int64_t segment_count,
              const int64_t* steps, const Group* groups, double grad_scale, int threads);

void adam_mixed_cpu(const MixedArrays& arrays, const Segment* segments, int64_t segment_count,
                    const int64_t* steps, const Group* groups, double grad_scale, int threads);

template <typename T>
void mean_cpu(Wide<T>* out, const std::vector<const T*>& chunks, int64_t length, int threads);

template <typename T>
double square_sum_cpu(const T* x, int64_t length, int threads);

template <typename T>
bool non_finite_cpu(const T* x, int64_t length, int threads);

// T: BFloat16 or Half.
template <typename T>
void refresh_cpu(float* wide, const T* narrow, int64_t length, int threads);

// hashes[r] = the fingerprint of row r.
void fingerprints_cpu(uint64_t* hashes, const FingerprintRow* rows, int64_t row_count, int threads);

void roofline_cpu(float* p, const float* g, float* m, float* v, int64_t length, int threads);

}  // namespace fusedshard
