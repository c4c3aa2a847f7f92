// The fused update in mixed precision on a GPU, with the bits of mixed_cpu.h.
#include "mixed_formats.cuh"

namespace fusedshard {
namespace {

__device__ __forceinline__ MixedWork prepare_mixed(const Segment& segment, const AdamTable& table,
                                                   const AdamControl& control, int64_t seed) {
  MixedWork work{prepare<float>(segment, table, control), {}};
  if (segment.active != 0) {
    work.random = random_key(seed, table.steps[segment.param] + 1, segment.param);
  }
  return work;
}

template <typename M, bool kHasMax>
__device__ __forceinline__ void update_eight(const MixedArrays& a, const Place& place) {
  const AdamScalars<float>& s = place.work.scalars;
  Eight<float> m = read_moment<M, SignedCode>(a.exp_avg, place);
  Eight<float> v = read_moment<M, UnsignedCode>(a.exp_avg_sq, place);
  Eight<float> p = read_param(a, place);
  const Eight<float> g = read_gradient(a.param_format, place);
  for (int k = 0; k < kEach; ++k) {
    adam_decay_and_moments(p.at[k], g.at[k], m.at[k], v.at[k], s);
  }
  Roundings roundings{false, {}};
  if (!std::is_same_v<M, float> && a.stochastic != 0) {
    roundings = {true, draw(place.work.random, place.in_param())};
  }
  write_moment<M, SignedCode, 0>(a.exp_avg, place, m, roundings);
  write_moment<M, UnsignedCode, 16>(a.exp_avg_sq, place, v, roundings);
  if (kHasMax && place.work.amsgrad) {
    const Eight<float> maxima = read_moment<M, UnsignedCode>(a.max_exp_avg_sq, place);
    for (int k = 0; k < kEach; ++k) v.at[k] = adam_maximum(maxima.at[k], v.at[k]);
    // To the nearest, so that it only grows where exp_avg_sq does.
    write_moment<M, UnsignedCode, 16>(a.max_exp_avg_sq, place, v, {false, {}});
  }
  for (int k = 0; k < kEach; ++k) adam_move(p.at[k], m.at[k], v.at[k], s);
  write_param(a, place, p);
}

// kHasMax: some group may have amsgrad.
template <typename M, bool kHasMax>
__global__ void __launch_bounds__(kThreads, kBlocks)
    adam_mixed_kernel(MixedArrays arrays, AdamTable table, AdamControl control) {
  if (skipped(control)) return;
  __shared__ MixedWork work;
  const auto prepare_row = [&](const Segment& row) {
    return prepare_mixed(row, table, control, arrays.seed);
  };
  for_tiles(work, table, prepare_row, [&](int32_t tile) {
    const int lane = threadIdx.x % kWarp;
    // The threads of a warp go on together, as long as the first of them has elements.
    for (int i = threadIdx.x * kEach; i < kTileElements; i += kThreads * kEach) {
      const Place place{work, tile * kTileElements + i};
      if (place.in_segment - lane * kEach >= work.segment.length) return;
      update_eight<M, kHasMax>(arrays, place);
    }
  });
}

template <typename M>
void adam_mixed(const MixedArrays& arrays, const AdamTable& table, const AdamControl& control,
                const Stream& stream) {
  const bool has_max = arrays.max_exp_avg_sq.values != nullptr;
  launch("adam_mixed", has_max ? adam_mixed_kernel<M, true> : adam_mixed_kernel<M, false>,
         table.tile_count, stream, arrays, table, control);
}

}  // namespace

void adam_mixed_cuda(const MixedArrays& arrays, const AdamTable& table, const AdamControl& control,
                     const Stream& stream) {
  if (arrays.moment_format == Format::kFloat) {
    adam_mixed<float>(arrays, table, control, stream);
  } else if (arrays.moment_format == Format::kBFloat16) {
    adam_mixed<BFloat16>(arrays, table, control, stream);
  } else {
    adam_mixed<uint8_t>(arrays, table, control, stream);
  }
}

}  // namespace fusedshard
