// Entry points of the CUDA kernels, free of CUDA's headers. All pointers but those in arguments by
// value are device memory. Every call returns once its work is queued on the stream, without
// waiting for the device, may be captured in a CUDA graph, and throws std::runtime_error with the
// kernel's name where the launch fails.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace fusedshard {

struct Stream {
  int device;
  void* handle;  // a cudaStream_t
};

// The segments of one bucket, and where the launch finds what differs from step to step.
struct AdamTable {
  const Segment* rows;
  const Tile* tiles;
  int64_t tile_count;
  const int64_t* steps;  // of each parameter, before this update
  const Group* groups;
};

struct AdamControl {
  double grad_scale;                // multiplies gradients
  const double* device_grad_scale;  // multiplies them too; may be null
  const float* found_inf;           // where it is not zero nothing changes; may be null
};

template <typename T>
void adam_cuda(const AdamArrays<T>& arrays, const AdamTable& table, const AdamControl& control,
               const Stream& stream);

// All arrays of it begin at 16-byte boundaries, but gradients, which may lie anywhere. Segments
// begin at multiples of 8 elements, with codes of kCodeBlock elements.
void adam_mixed_cuda(const MixedArrays& arrays, const AdamTable& table, const AdamControl& control,
                     const Stream& stream);

// out[i] = (chunks[i] + chunks[i + stride] + ...) / n, added in that order; out may be one of them
// where it is of their type.
template <typename T>
void mean_cuda(Wide<T>* out, const T* chunks, int64_t stride, int64_t n, int64_t length,
               const Stream& stream);

// Doubles that square_sum_cuda wants to work in, at least 1.
int64_t square_sum_workspace(int64_t length);

// The last element of the workspace becomes the sum of squares, with the CPU's bits.
template <typename T>
void square_sum_cuda(double* workspace, const T* x, int64_t length, const Stream& stream);

// Sets *found_inf to 1 where an element is infinite or NaN, and otherwise leaves it.
template <typename T>
void found_inf_cuda(float* found_inf, const T* x, int64_t length, const Stream& stream);

// wide[i] = refreshed(wide[i], narrow[i])
template <typename T>
void refresh_cuda(float* wide, const T* narrow, int64_t length, const Stream& stream);

// hashes[r] = the fingerprint of row r. The rows have `block_count` blocks in all, for each of
// which there is a word in `terms` to work in.
void fingerprints_cuda(uint64_t* hashes, uint64_t* terms, const FingerprintRow* rows,
                       int64_t row_count, int64_t block_count, const Stream& stream);

// As pack_cpu and unpack_cpu.
void pack_cuda(char* out, const Segment* rows, const Tile* tiles, int64_t tile_count, int64_t numel,
               int64_t itemsize, const Stream& stream);
void unpack_cuda(const char* in, const Segment* rows, const Tile* tiles, int64_t tile_count,
                 int64_t itemsize, const Stream& stream);

// Copies words from host memory, which is free for other use when the call returns: they travel as
// kernel arguments, so a CUDA graph keeps them.
void write_words_cuda(int64_t* to, const int64_t* words, int64_t count, const Stream& stream);

// Counts one step of every used parameter, unless *found_inf (may be null) says that it was
// skipped; step_mirror is steps as torch shows them.
void count_steps_cuda(int64_t* steps, float* step_mirror, const int64_t* used, int64_t count,
                      const float* found_inf, const Stream& stream);

}  // namespace fusedshard
