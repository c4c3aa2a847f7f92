// The fused update on a GPU. The arithmetic is adam.h's.
#include "adam_tiles.cuh"

namespace fusedshard {
namespace {

// Two fp64 elements a thread leave no registers for the scalars while it divides: a barrier to the
// compiler makes it read them from shared memory again, where it would otherwise spill.
template <typename T>
using Scalars = std::conditional_t<sizeof(T) == 8, const AdamScalars<T>&, const AdamScalars<T>>;

template <typename T>
__device__ __forceinline__ void forget_scalars() {
  if (sizeof(T) == 8) asm volatile("" ::: "memory");
}

template <typename T, bool kAmsgrad>
__device__ __forceinline__ void update_tile(const AdamArrays<T>& arrays, const Work<T>& work,
                                            int32_t tile, bool together) {
  const int64_t length = work.segment.length, start = work.segment.start;
  const int64_t lead = together ? elements_to_alignment(arrays.param + start) : length;
  const TileSpan at = tile_span<T>(tile, length, lead);
  T* const p = arrays.param + start + at.first;
  T* const m = arrays.exp_avg + start + at.first;
  T* const v = arrays.exp_avg_sq + start + at.first;
  T* const vmax = kAmsgrad ? arrays.max_exp_avg_sq + start + at.first : nullptr;
  const T* const g = reinterpret_cast<const T*>(work.segment.grad) + at.first;
  Scalars<T> s = work.scalars;
  const bool whole_gradient = aligned(g + at.span.body);
  constexpr int kWidth = Vector<T>::kWidth;
  for_tile<T>(
      at.span,
      [&](int i) {
        adam_decay_and_moments(p[i], g[i], m[i], v[i], s);
        if (kAmsgrad) vmax[i] = adam_maximum(vmax[i], v[i]);
        adam_move(p[i], m[i], kAmsgrad ? vmax[i] : v[i], s);
      },
      [&](int i) {
        Vector<T> gs;
        if (whole_gradient) {
          gs = load(g + i);
        } else {
          for (int k = 0; k < kWidth; ++k) gs.at[k] = g[i + k];
        }
        Vector<T> ps = load(p + i), ms = load(m + i), vs = load(v + i), maxima{};
        if (kAmsgrad) maxima = load(vmax + i);
        for (int k = 0; k < kWidth; ++k) {
          adam_decay_and_moments(ps.at[k], gs.at[k], ms.at[k], vs.at[k], s);
          if (kAmsgrad) maxima.at[k] = adam_maximum(maxima.at[k], vs.at[k]);
        }
        store(m + i, ms);
        store(v + i, vs);
        if (kAmsgrad) store(vmax + i, maxima);
        for (int k = 0; k < kWidth; ++k) {
          forget_scalars<T>();
          adam_move(ps.at[k], ms.at[k], kAmsgrad ? maxima.at[k] : vs.at[k], s);
        }
        store(p + i, ps);
      });
}

// kHasMax: some group may have amsgrad. `together`: the arrays are aligned alike, so that what is
// a whole vector of one is one of all.
template <typename T, bool kHasMax>
__global__ void __launch_bounds__(kThreads, kBlocks)
    adam_kernel(AdamArrays<T> arrays, AdamTable table, AdamControl control, bool together) {
  if (skipped(control)) return;
  __shared__ Work<T> work;
  for_tiles(
      work, table, [&](const Segment& row) { return prepare<T>(row, table, control); },
      [&](int32_t tile) {
        if (kHasMax && work.amsgrad) {
          update_tile<T, true>(arrays, work, tile, together);
        } else {
          update_tile<T, false>(arrays, work, tile, together);
        }
      });
}

}  // namespace

template <typename T>
void adam_cuda(const AdamArrays<T>& arrays, const AdamTable& table, const AdamControl& control,
               const Stream& stream) {
  const bool has_max = arrays.max_exp_avg_sq != nullptr;
  const int64_t lead = elements_to_alignment(arrays.param);
  const bool together = lead == elements_to_alignment(arrays.exp_avg) &&
                        lead == elements_to_alignment(arrays.exp_avg_sq) &&
                        (!has_max || lead == elements_to_alignment(arrays.max_exp_avg_sq));
  launch("adam", has_max ? adam_kernel<T, true> : adam_kernel<T, false>, table.tile_count, stream,
         arrays, table, control, together);
}

template void adam_cuda(const AdamArrays<float>&, const AdamTable&, const AdamControl&,
                        const Stream&);
template void adam_cuda(const AdamArrays<double>&, const AdamTable&, const AdamControl&,
                        const Stream&);

}  // namespace fusedshard
