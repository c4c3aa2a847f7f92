// Gradients into a send buffer and back, on a GPU. Elements are moved as unsigned integers of
// their size.
#include <string>

#include "launch.cuh"

namespace fusedshard {
namespace {

template <typename U>
__device__ __forceinline__ const U* gradient(const Segment& row) {
  return reinterpret_cast<const U*>(row.grad);
}

template <typename U>
__device__ __forceinline__ void zero(U* out, int64_t begin, int64_t end) {
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) out[i] = 0;
}

// Moves tile `index` of an array of `length` elements.
template <typename U>
__device__ __forceinline__ void copy_tile(U* to, const U* from, int32_t index, int64_t length) {
  const int64_t lead = elements_to_alignment(to);
  const bool together = lead == elements_to_alignment(from);
  const TileSpan tile = tile_span<U>(index, length, together ? lead : length);
  to += tile.first;
  from += tile.first;
  for_tile<U>(
      tile.span, [&](int i) { to[i] = from[i]; }, [&](int i) { store(to + i, load(from + i)); });
}

template <typename U>
__device__ __forceinline__ void zero_tile(U* out, int32_t index, int64_t length) {
  const TileSpan tile = tile_span<U>(index, length, elements_to_alignment(out));
  out += tile.first;
  for_tile<U>(tile.span, [&](int i) { out[i] = 0; }, [&](int i) { store(out + i, Vector<U>{}); });
}

// The first tile of a segment also clears what lies between it and the segment before, the last of
// all what lies behind.
template <typename U>
__global__ void __launch_bounds__(kThreads, kBlocks)
    pack_kernel(U* out, const Segment* rows, const Tile* tiles, int64_t tile_count, int64_t numel) {
  for (int64_t t = blockIdx.x; t < tile_count; t += gridDim.x) {
    const Tile tile = tiles[t];
    const Segment row = rows[tile.segment];
    if (row.grad != 0) {
      copy_tile(out + row.start, gradient<U>(row), tile.index, row.length);
    } else {
      zero_tile(out + row.start, tile.index, row.length);
    }
    if (tile.index == 0) {
      int before = tile.segment - 1;
      while (before >= 0 && rows[before].length == 0) --before;  // these have no tile
      zero(out, before < 0 ? 0 : rows[before].start + rows[before].length, row.start);
    }
    if (t == tile_count - 1) zero(out, row.start + row.length, numel);
  }
}

template <typename U>
__global__ void __launch_bounds__(kThreads, kBlocks)
    unpack_kernel(const U* in, const Segment* rows, const Tile* tiles, int64_t tile_count) {
  for (int64_t t = blockIdx.x; t < tile_count; t += gridDim.x) {
    const Tile tile = tiles[t];
    const Segment row = rows[tile.segment];
    if (row.grad == 0) continue;
    copy_tile(const_cast<U*>(gradient<U>(row)), in + row.start, tile.index, row.length);
  }
}

// Calls use(U{}) with the unsigned integer of a size.
template <typename Use>
void with_integer(int64_t itemsize, const Use& use) {
  switch (itemsize) {
    case 2:
      return use(uint16_t{});
    case 4:
      return use(uint32_t{});
    case 8:
      return use(uint64_t{});
    default:
      throw std::invalid_argument("itemsize: got " + std::to_string(itemsize) +
                                  ", wanted 2, 4 or 8");
  }
}

}  // namespace

void pack_cuda(char* out, const Segment* rows, const Tile* tiles, int64_t tile_count, int64_t numel,
               int64_t itemsize, const Stream& stream) {
  if (tile_count == 0) {
    const DeviceGuard guard(stream.device, "pack");
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    check(cudaMemsetAsync(out, 0, static_cast<size_t>(numel * itemsize), handle), "pack");
    return;
  }
  with_integer(itemsize, [&](auto unit) {
    using U = decltype(unit);
    launch("pack", pack_kernel<U>, tile_count, stream, reinterpret_cast<U*>(out), rows, tiles,
           tile_count, numel);
  });
}

void unpack_cuda(const char* in, const Segment* rows, const Tile* tiles, int64_t tile_count,
                 int64_t itemsize, const Stream& stream) {
  with_integer(itemsize, [&](auto unit) {
    using U = decltype(unit);
    launch("unpack", unpack_kernel<U>, tile_count, stream, reinterpret_cast<const U*>(in), rows,
           tiles, tile_count);
  });
}

}  // namespace fusedshard
