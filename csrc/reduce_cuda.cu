// On a GPU, with the CPU's bits: the mean of chunks in rank order, the sum of squares, and means
// beside their roundings.
#include "launch.cuh"

namespace fusedshard {
namespace {

// Lanes of a sum that a thread takes: four, or as many as one access moves.
template <typename T>
constexpr int kLanesEach =
    Vector<T>::kWidth > kSumLanes / kWarp ? Vector<T>::kWidth : kSumLanes / kWarp;

// Stores a vector's elements in what they were computed with: one access, or two.
template <typename T>
__device__ __forceinline__ void store_wide(Wide<T>* to,
                                           const Wide<T> (&values)[Vector<T>::kWidth]) {
  for (int at = 0; at < Vector<T>::kWidth; at += Vector<Wide<T>>::kWidth) {
    Vector<Wide<T>> vector;
    for (int k = 0; k < Vector<Wide<T>>::kWidth; ++k) vector.at[k] = values[at + k];
    store(to + at, vector);
  }
}

// `lead`: as for make_span.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mean_kernel(Wide<T>* out, const T* chunks, int64_t stride, int64_t n, int64_t length,
                int64_t lead) {
  const auto divisor = static_cast<Wide<T>>(n);
  for_span<T>(
      make_span<T>(length, lead), global_thread(), all_threads(),
      [&](int64_t i) {
        Wide<T> sum = widen(chunks[i]);
        for (int64_t c = 1; c < n; ++c) sum += widen(chunks[c * stride + i]);
        out[i] = sum / divisor;
      },
      [&](int64_t i) {
        const Vector<T> first = load(chunks + i);
        Wide<T> sum[Vector<T>::kWidth];
        for (int k = 0; k < Vector<T>::kWidth; ++k) sum[k] = widen(first.at[k]);
        for (int64_t c = 1; c < n; ++c) {
          const Vector<T> chunk = load(chunks + c * stride + i);
          for (int k = 0; k < Vector<T>::kWidth; ++k) sum[k] += widen(chunk.at[k]);
        }
        for (int k = 0; k < Vector<T>::kWidth; ++k) sum[k] /= divisor;
        store_wide<T>(out + i, sum);
      });
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    refresh_kernel(float* wide, const T* narrow, int64_t length, int64_t lead) {
  for_span<T>(
      make_span<T>(length, lead), global_thread(), all_threads(),
      [&](int64_t i) { wide[i] = refreshed(wide[i], narrow[i]); },
      [&](int64_t i) {
        const Vector<T> vector = load(narrow + i);
        for (int at = 0; at < Vector<T>::kWidth; at += Vector<float>::kWidth) {
          Vector<float> values = load(wide + i + at);
          for (int k = 0; k < Vector<float>::kWidth; ++k) {
            values.at[k] = refreshed(values.at[k], vector.at[at + k]);
          }
          store(wide + i + at, values);
        }
      });
}

// The elements from x on for a thread's lanes, of which `present` exist; zero for the others.
template <typename T>
__device__ __forceinline__ void load_lanes(T (&values)[kLanesEach<T>], const T* x, int64_t present,
                                           bool whole_vectors) {
  if (whole_vectors && present >= kLanesEach<T>) {
    for (int at = 0; at < kLanesEach<T>; at += Vector<T>::kWidth) {
      const Vector<T> vector = load(x + at);
      for (int k = 0; k < Vector<T>::kWidth; ++k) values[at + k] = vector.at[k];
    }
  } else {
    for (int k = 0; k < kLanesEach<T>; ++k) values[k] = k < present ? x[k] : T{};
  }
}

// partials[b] = sum (of squares) of block b of kSumBlock elements. A warp, or half of one, takes a
// block; thread t of it has lanes t * kLanesEach and following of sum_block() in kernels_cpu.cpp,
// and lanes fold in its order.
template <typename T, bool kSquare>
__global__ void __launch_bounds__(kThreads, kBlocks)
    partial_sums_kernel(double* partials, const T* x, int64_t length, bool whole_vectors) {
  constexpr int kEach = kLanesEach<T>;
  constexpr int kGroup = kSumLanes / kEach;  // threads of a block
  const int lane = threadIdx.x % kWarp;
  const int64_t blocks = (length + kSumBlock - 1) / kSumBlock;
  const int64_t at_once = static_cast<int64_t>(gridDim.x) * (kThreads / kGroup);
  const int64_t of_warp = global_thread() / kWarp * (kWarp / kGroup);
  // All threads of a warp shuffle as long as one of them has a block.
  for (int64_t first = of_warp; first < blocks; first += at_once) {
    const int64_t b = first + lane / kGroup;
    const int64_t end = length - b * kSumBlock < kSumBlock ? length - b * kSumBlock : kSumBlock;
    double sums[kEach] = {};
    for (int64_t i = lane % kGroup * kEach; i < end; i += kSumLanes) {
      T values[kEach];
      load_lanes(values, x + b * kSumBlock + i, end - i, whole_vectors);
      for (int k = 0; k < kEach; ++k) {
        const double value = widen(values[k]);
        sums[k] += kSquare ? value * value : value;
      }
    }
    for (int half = kGroup / 2; half > 0; half /= 2) {
      for (int k = 0; k < kEach; ++k) {
        sums[k] += __shfl_down_sync(0xffffffffu, sums[k], half);
      }
    }
    for (int half = kEach / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    if (lane % kGroup == 0 && b < blocks) partials[b] = sums[0];
  }
}

template <typename T, bool kSquare>
void partial_sums(double* partials, const T* x, int64_t length, const Stream& stream) {
  launch(kSquare ? "square_sum" : "square_sum (partial sums)", partial_sums_kernel<T, kSquare>,
         blocks_for(length, kSumBlock * (kThreads * kLanesEach<T> / kSumLanes)), stream, partials,
         x, length, aligned(x));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    found_inf_kernel(float* found_inf, const T* x, int64_t length, int64_t lead) {
  bool found = false;
  for_span<T>(
      make_span<T>(length, lead), global_thread(), all_threads(),
      [&](int64_t i) { found |= non_finite(widen(x[i])); },
      [&](int64_t i) {
        const Vector<T> vector = load(x + i);
        for (int k = 0; k < Vector<T>::kWidth; ++k) found |= non_finite(widen(vector.at[k]));
      });
  // Several blocks may store, but all the same value.
  if (__syncthreads_or(found) && threadIdx.x == 0) *found_inf = 1.0f;
}

}  // namespace

template <typename T>
void mean_cuda(Wide<T>* out, const T* chunks, int64_t stride, int64_t n, int64_t length,
               const Stream& stream) {
  const int64_t lead = elements_to_alignment(chunks);
  const bool together = aligned(out + lead) && stride % Vector<T>::kWidth == 0;
  launch("mean", mean_kernel<T>, blocks_for(length, kThreads * Vector<T>::kWidth), stream, out,
         chunks, stride, n, length, together ? lead : length);
}

int64_t square_sum_workspace(int64_t length) {
  int64_t total = 0;
  do {
    length = blocks_for(length, kSumBlock);
    total += length;
  } while (length > 1);
  return total > 0 ? total : 1;
}

template <typename T>
void square_sum_cuda(double* workspace, const T* x, int64_t length, const Stream& stream) {
  if (length == 0) {
    const DeviceGuard guard(stream.device, "square_sum");
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    check(cudaMemsetAsync(workspace, 0, sizeof(double), handle), "square_sum");
    return;
  }
  partial_sums<T, true>(workspace, x, length, stream);
  for (int64_t count = blocks_for(length, kSumBlock); count > 1;) {
    double* const sums = workspace;
    workspace += count;
    partial_sums<double, false>(workspace, sums, count, stream);
    count = blocks_for(count, kSumBlock);
  }
}

template <typename T>
void found_inf_cuda(float* found_inf, const T* x, int64_t length, const Stream& stream) {
  launch("found_inf", found_inf_kernel<T>, blocks_for(length, kThreads * Vector<T>::kWidth), stream,
         found_inf, x, length, elements_to_alignment(x));
}

template <typename T>
void refresh_cuda(float* wide, const T* narrow, int64_t length, const Stream& stream) {
  const int64_t lead = elements_to_alignment(narrow);
  launch("refresh", refresh_kernel<T>, blocks_for(length, kThreads * Vector<T>::kWidth), stream,
         wide, narrow, length, aligned(wide + lead) ? lead : length);
}

#define FUSEDSHARD_REDUCTIONS(T)                                                            \
  template void mean_cuda<T>(Wide<T>*, const T*, int64_t, int64_t, int64_t, const Stream&); \
  template void square_sum_cuda<T>(double*, const T*, int64_t, const Stream&);              \
  template void found_inf_cuda<T>(float*, const T*, int64_t, const Stream&)
FUSEDSHARD_REDUCTIONS(float);
FUSEDSHARD_REDUCTIONS(double);
FUSEDSHARD_REDUCTIONS(BFloat16);
FUSEDSHARD_REDUCTIONS(Half);
template void refresh_cuda(float*, const BFloat16*, int64_t, const Stream&);
template void refresh_cuda(float*, const Half*, int64_t, const Stream&);

}  // namespace fusedshard
