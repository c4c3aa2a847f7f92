// Sums on a GPU, with the CPU's bits: the mean of chunks in rank order, and the sum of squares.
#include "launch.cuh"

namespace fusedshard {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kLanesEach = kSumLanes / kWarp;  // of a thread

__device__ __forceinline__ int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ int64_t all_threads() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

// `lead`: as for make_span.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mean_kernel(T* out, const T* chunks, int64_t stride, int64_t n, int64_t length, int64_t lead) {
  const T divisor = static_cast<T>(n);
  for_span<T>(
      make_span<T>(length, lead), global_thread(), all_threads(),
      [&](int64_t i) {
        T sum = chunks[i];
        for (int64_t c = 1; c < n; ++c) sum += chunks[c * stride + i];
        out[i] = sum / divisor;
      },
      [&](int64_t i) {
        Vector<T> sum = load(chunks + i);
        for (int64_t c = 1; c < n; ++c) {
          const Vector<T> chunk = load(chunks + c * stride + i);
          for (int k = 0; k < Vector<T>::kWidth; ++k) sum.at[k] += chunk.at[k];
        }
        for (int k = 0; k < Vector<T>::kWidth; ++k) sum.at[k] /= divisor;
        store(out + i, sum);
      });
}

// The kLanesEach elements from x on, of which `present` exist; zero for the others.
template <typename T>
__device__ __forceinline__ void load_lanes(T (&values)[kLanesEach], const T* x, int64_t present,
                                           bool whole_vectors) {
  if (whole_vectors && present >= kLanesEach) {
    for (int at = 0; at < kLanesEach; at += Vector<T>::kWidth) {
      const Vector<T> vector = load(x + at);
      for (int k = 0; k < Vector<T>::kWidth; ++k) values[at + k] = vector.at[k];
    }
  } else {
    for (int k = 0; k < kLanesEach; ++k) values[k] = k < present ? x[k] : T(0);
  }
}

// partials[b] = sum (of squares) of block b of kSumBlock elements. A warp takes a block; thread t
// of it has lanes 4t to 4t + 3 of sum_block() in kernels_cpu.cpp, and lanes fold in its order.
template <typename T, bool kSquare>
__global__ void __launch_bounds__(kThreads, kBlocks)
    partial_sums_kernel(double* partials, const T* x, int64_t length, bool whole_vectors) {
  const int lane = threadIdx.x % kWarp;
  const int64_t blocks = (length + kSumBlock - 1) / kSumBlock;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t b = global_thread() / kWarp; b < blocks; b += warps) {
    const int64_t end = length - b * kSumBlock < kSumBlock ? length - b * kSumBlock : kSumBlock;
    double sums[kLanesEach] = {};
    for (int64_t i = lane * kLanesEach; i < end; i += kSumLanes) {
      T values[kLanesEach];
      load_lanes(values, x + b * kSumBlock + i, end - i, whole_vectors);
      for (int k = 0; k < kLanesEach; ++k) {
        const double value = values[k];
        sums[k] += kSquare ? value * value : value;
      }
    }
    for (int half = kWarp / 2; half > 0; half /= 2) {
      for (int k = 0; k < kLanesEach; ++k) {
        sums[k] += __shfl_down_sync(0xffffffffu, sums[k], half);
      }
    }
    for (int half = kLanesEach / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    if (lane == 0) partials[b] = sums[0];
  }
}

template <typename T, bool kSquare>
void partial_sums(double* partials, const T* x, int64_t length, const Stream& stream) {
  launch(kSquare ? "square_sum" : "square_sum (partial sums)", partial_sums_kernel<T, kSquare>,
         blocks_for(blocks_for(length, kSumBlock), kWarps), stream, partials, x, length,
         aligned(x));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocks)
    found_inf_kernel(float* found_inf, const T* x, int64_t length, int64_t lead) {
  bool found = false;
  for_span<T>(
      make_span<T>(length, lead), global_thread(), all_threads(),
      [&](int64_t i) { found |= non_finite(x[i]); },
      [&](int64_t i) {
        const Vector<T> vector = load(x + i);
        for (int k = 0; k < Vector<T>::kWidth; ++k) found |= non_finite(vector.at[k]);
      });
  // Several blocks may store, but all the same value.
  if (__syncthreads_or(found) && threadIdx.x == 0) *found_inf = 1.0f;
}

}  // namespace

template <typename T>
void mean_cuda(T* out, const T* chunks, int64_t stride, int64_t n, int64_t length,
               const Stream& stream) {
  const bool together = elements_to_alignment(out) == elements_to_alignment(chunks) &&
                        stride % Vector<T>::kWidth == 0;
  launch("mean", mean_kernel<T>, blocks_for(length, kThreads * Vector<T>::kWidth), stream, out,
         chunks, stride, n, length, together ? elements_to_alignment(out) : length);
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

template void mean_cuda(float*, const float*, int64_t, int64_t, int64_t, const Stream&);
template void mean_cuda(double*, const double*, int64_t, int64_t, int64_t, const Stream&);
template void square_sum_cuda(double*, const float*, int64_t, const Stream&);
template void square_sum_cuda(double*, const double*, int64_t, const Stream&);
template void found_inf_cuda(float*, const float*, int64_t, const Stream&);
template void found_inf_cuda(float*, const double*, int64_t, const Stream&);

}  // namespace fusedshard
