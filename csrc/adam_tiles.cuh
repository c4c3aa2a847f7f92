// How the kernels of the update walk over a bucket: one launch, whatever the number of its
// segments.
#pragma once

#include "launch.cuh"

namespace fusedshard {
namespace {

// What the threads of a block share of the segment that they are in.
template <typename T>
struct Work {
  Segment segment;
  bool amsgrad;
  AdamScalars<T> scalars;
};

template <typename T>
__device__ Work<T> prepare(const Segment& segment, const AdamTable& table,
                           const AdamControl& control) {
  Work<T> work{segment, false, {}};
  if (segment.active == 0) return work;
  const Group group = table.groups[segment.group];
  const double on_device = control.device_grad_scale == nullptr ? 1.0 : *control.device_grad_scale;
  work.amsgrad = group.amsgrad != 0.0;
  work.scalars =
      adam_scalars<T>(group, table.steps[segment.param] + 1, control.grad_scale * on_device);
  return work;
}

__device__ __forceinline__ bool skipped(const AdamControl& control) {
  return control.found_inf != nullptr && *control.found_inf != 0.0f;
}

// Calls update(index) for each tile of an active segment that this block takes. `work`, in shared
// memory, is then what prepare(row) gave for the segment.
template <typename W, typename Prepare, typename Update>
__device__ __forceinline__ void for_tiles(W& work, const AdamTable& table, const Prepare& prepare,
                                          const Update& update) {
  // 32 bits, and the last tile read again, since registers are scarce.
  for (unsigned t = blockIdx.x; t < table.tile_count; t += gridDim.x) {
    const Tile tile = table.tiles[t];
    if (t < gridDim.x || table.tiles[t - gridDim.x].segment != tile.segment) {
      __syncthreads();  // the others may still read the last segment's
      if (threadIdx.x == 0) work = prepare(table.rows[tile.segment]);
      __syncthreads();
    }
    if (work.segment.active != 0) update(tile.index);
  }
}

}  // namespace
}  // namespace fusedshard
