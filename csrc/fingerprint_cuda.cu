// Fingerprints on a GPU, with the CPU's bits.
#include "launch.cuh"

namespace fusedshard {
namespace {

constexpr int kWarps = kThreads / kWarp;  // of a block of threads
constexpr int kLanesEach = kFingerprintLanes / kWarp;
constexpr int64_t kBytesEach = kLanesEach * kWordBytes;  // of a round
static_assert(kBytesEach == kVectorBytes);

__device__ __forceinline__ uint64_t sum_of_warp(uint64_t sum) {
  for (int half = kWarp / 2; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  return sum;
}

// The lanes of a thread.
struct Lanes {
  uint64_t at[kLanesEach];
};

__device__ __forceinline__ Lanes start(int first) {
  Lanes lanes;
  for (int k = 0; k < kLanesEach; ++k) lanes.at[k] = lane_start(first + k);
  return lanes;
}

// A word of which `present` bytes exist, in units that its address allows; the others are zero.
template <typename Unit>
__device__ __forceinline__ uint64_t gather(const char* bytes, int64_t present) {
  uint64_t word = 0;
  for (int at = 0; at < kWordBytes; at += sizeof(Unit)) {
    if (at >= present) break;
    word |= static_cast<uint64_t>(*reinterpret_cast<const Unit*>(bytes + at)) << (8 * at);
  }
  return word;
}

// `bytes`: where the thread's words of the first of some whole rounds are.
__device__ __forceinline__ void hash_vectors(Lanes& lanes, const char* bytes, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const auto words = load(reinterpret_cast<const uint64_t*>(bytes + round * kRoundBytes));
    for (int k = 0; k < kLanesEach; ++k) lanes.at[k] = lane_step(lanes.at[k], words.at[k]);
  }
}

// The same from any address, with `present` bytes of a round from there on.
template <typename Unit>
__device__ __forceinline__ void hash_units(Lanes& lanes, const char* bytes, int rounds,
                                           int64_t present) {
  for (int round = 0; round < rounds; ++round) {
    for (int k = 0; k < kLanesEach; ++k) {
      const char* const from = bytes + round * kRoundBytes + k * kWordBytes;
      lanes.at[k] = lane_step(lanes.at[k], gather<Unit>(from, present - k * kWordBytes));
    }
  }
}

// terms[b] = block_term of block b, counted over all rows. A warp takes a block.
__global__ void __launch_bounds__(kThreads, kBlocks)
    fingerprint_blocks_kernel(uint64_t* terms, const FingerprintRow* rows, int64_t row_count,
                              int64_t block_count) {
  const int thread = threadIdx.x % kWarp;
  for (int64_t b = global_thread() / kWarp; b < block_count; b += all_threads() / kWarp) {
    const FingerprintRow row = rows[row_of_block(rows, row_count, b)];
    const int64_t block = b - row.first_block;
    const int64_t left = row.bytes - block * kFingerprintBlock;
    const int length = static_cast<int>(left < kFingerprintBlock ? left : kFingerprintBlock);
    const int rounds = length / static_cast<int>(kRoundBytes);
    const char* const bytes = reinterpret_cast<const char*>(row.address) +
                              block * kFingerprintBlock + thread * kBytesEach;
    Lanes lanes = start(thread * kLanesEach);
    if (row.address % kVectorBytes == 0) {
      hash_vectors(lanes, bytes, rounds);
    } else if (row.address % sizeof(uint32_t) == 0) {
      hash_units<uint32_t>(lanes, bytes, rounds, kBytesEach);
    } else {
      hash_units<uint8_t>(lanes, bytes, rounds, kBytesEach);
    }
    if (length % kRoundBytes != 0) {
      const int64_t present = length % kRoundBytes - thread * kBytesEach;
      hash_units<uint8_t>(lanes, bytes + rounds * kRoundBytes, 1, present);
    }
    uint64_t sum = 0;
    for (int k = 0; k < kLanesEach; ++k) sum += mix(lanes.at[k]);
    sum = sum_of_warp(sum);
    if (thread == 0) terms[b] = block_term(sum, block);
  }
}

// hashes[r] = the sum of all terms of row r. A block of threads takes a row.
__global__ void __launch_bounds__(kThreads, kBlocks)
    fingerprint_rows_kernel(uint64_t* hashes, const uint64_t* terms, const FingerprintRow* rows,
                            int64_t row_count) {
  __shared__ uint64_t sums[kWarps];
  for (int64_t r = blockIdx.x; r < row_count; r += gridDim.x) {
    const FingerprintRow row = rows[r];
    const int64_t end = row.first_block + fingerprint_blocks(row.bytes);
    uint64_t sum = 0;
    for (int64_t b = row.first_block + threadIdx.x; b < end; b += kThreads) sum += terms[b];
    sum = sum_of_warp(sum);
    __syncthreads();  // the first thread may still read the last sums
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t hash = length_term(row.bytes);
      for (int warp = 0; warp < kWarps; ++warp) hash += sums[warp];
      hashes[r] = hash;
    }
  }
}

}  // namespace

void fingerprints_cuda(uint64_t* hashes, uint64_t* terms, const FingerprintRow* rows,
                       int64_t row_count, int64_t block_count, const Stream& stream) {
  launch("fingerprints (blocks)", fingerprint_blocks_kernel, blocks_for(block_count, kWarps),
         stream, terms, rows, row_count, block_count);
  launch("fingerprints", fingerprint_rows_kernel, row_count, stream, hashes, terms, rows,
         row_count);
}

}  // namespace fusedshard
