// What kernels read of a step beside the arrays, kept on a GPU: table rows, groups, step counts.
//
// The words travel as kernel arguments. A copy from host memory would have to be from pinned memory
// that lives until it has happened, and under a CUDA graph as long as the graph; arguments are
// copied at the launch. A step changes few words, if any.
#include "launch.cuh"

namespace fusedshard {
namespace {

constexpr int64_t kWords = 480;  // with the other arguments below the 4 KiB that a launch may carry

struct Words {
  int64_t at[kWords];
};

__global__ void __launch_bounds__(kThreads, kBlocks)
    write_words_kernel(int64_t* to, const __grid_constant__ Words words, int64_t count) {
  for (int64_t i = threadIdx.x; i < count; i += kThreads) to[i] = words.at[i];
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    count_steps_kernel(int64_t* steps, float* step_mirror, const int64_t* used, int64_t count,
                       const float* found_inf) {
  if (found_inf != nullptr && *found_inf != 0.0f) return;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i < count; i += threads) {
    steps[i] += used[i];
    step_mirror[i] = static_cast<float>(steps[i]);
  }
}

}  // namespace

void write_words_cuda(int64_t* to, const int64_t* words, int64_t count, const Stream& stream) {
  for (int64_t at = 0; at < count; at += kWords) {
    Words part;
    const int64_t length = count - at < kWords ? count - at : kWords;
    for (int64_t i = 0; i < length; ++i) part.at[i] = words[at + i];
    for (int64_t i = length; i < kWords; ++i) part.at[i] = 0;
    launch("write_words", write_words_kernel, 1, stream, to + at, part, length);
  }
}

void count_steps_cuda(int64_t* steps, float* step_mirror, const int64_t* used, int64_t count,
                      const float* found_inf, const Stream& stream) {
  launch("count_steps", count_steps_kernel, blocks_for(count, kThreads), stream, steps, step_mirror,
         used, count, found_inf);
}

}  // namespace fusedshard
