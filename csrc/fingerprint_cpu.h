// Fingerprints on the CPU. Included once for each instruction set, by kernels_cpu.cpp.
#pragma once

#include "fingerprint.h"
#include "loops_cpu.h"

namespace fusedshard {
namespace {

// Blocks that a thread takes at once.
constexpr int64_t kBlocksAtOnce = 32;
// Ahead of what is hashed: with this much arithmetic a word, a processor looks too few cache lines
// ahead by itself. Past the end of memory a prefetch does nothing.
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kCacheLine = 64;

struct LaneStarts {
  uint64_t at[kFingerprintLanes];
};

constexpr LaneStarts lane_starts() {
  LaneStarts starts{};
  for (int lane = 0; lane < kFingerprintLanes; ++lane) starts.at[lane] = lane_start(lane);
  return starts;
}

constexpr LaneStarts kLaneStarts = lane_starts();

inline void hash_rounds(uint64_t* __restrict lanes, const char* __restrict bytes, int64_t rounds) {
  for (int64_t round = 0; round < rounds; ++round, bytes += kRoundBytes) {
    for (int64_t line = 0; line < kRoundBytes; line += kCacheLine) {
      __builtin_prefetch(bytes + kPrefetchBytes + line);
    }
    for (int lane = 0; lane < kFingerprintLanes; ++lane) {
      uint64_t word;
      memcpy(&word, bytes + lane * kWordBytes, sizeof word);
      lanes[lane] = lane_step(lanes[lane], word);
    }
  }
}

// Of `length` bytes, at most a block.
inline uint64_t hash_block(const char* bytes, int64_t length, int64_t block) {
  alignas(64) uint64_t lanes[kFingerprintLanes];
  for (int lane = 0; lane < kFingerprintLanes; ++lane) lanes[lane] = kLaneStarts.at[lane];
  const int64_t rest = length % kRoundBytes;
  hash_rounds(lanes, bytes, length / kRoundBytes);
  if (rest > 0) {
    char round[kRoundBytes] = {};
    memcpy(round, bytes + length - rest, static_cast<size_t>(rest));
    hash_rounds(lanes, round, 1);
  }
  uint64_t sum = 0;
  for (int lane = 0; lane < kFingerprintLanes; ++lane) sum += mix(lanes[lane]);
  return block_term(sum, block);
}

// Adds the terms of blocks [begin, end), counted over all rows, to their rows' hashes.
inline void hash_blocks(uint64_t* hashes, const FingerprintRow* rows, int64_t row_count,
                        int64_t begin, int64_t end) {
  for (int64_t r = row_of_block(rows, row_count, begin); begin < end; ++r) {
    const FingerprintRow row = rows[r];
    const char* const bytes = reinterpret_cast<const char*>(row.address);
    const int64_t stop = smaller(end, row.first_block + fingerprint_blocks(row.bytes));
    uint64_t sum = 0;
    for (; begin < stop; ++begin) {
      const int64_t block = begin - row.first_block;
      const int64_t at = block * kFingerprintBlock;
      sum += hash_block(bytes + at, smaller(kFingerprintBlock, row.bytes - at), block);
    }
#pragma omp atomic
    hashes[r] += sum;
  }
}

void fingerprints(uint64_t* hashes, const FingerprintRow* rows, int64_t row_count, int threads) {
  int64_t blocks = 0;
  for (int64_t r = 0; r < row_count; ++r) {
    hashes[r] = length_term(rows[r].bytes);
    blocks += fingerprint_blocks(rows[r].bytes);
  }
  const int64_t stretches = (blocks + kBlocksAtOnce - 1) / kBlocksAtOnce;
  const int parts = static_cast<int>(smaller(stretches, larger(1, threads)));
  // Threads take stretches as they get free, since blocks of small tensors take less time. Not by
  // schedule(dynamic), whose functions are missing from older OpenMP runtimes that torch may bring.
  int64_t next = 0;
#pragma omp parallel num_threads(parts) if (parts > 1)
  for (int64_t s = 0; s < stretches;) {
#pragma omp atomic capture
    s = next++;
    const int64_t begin = s * kBlocksAtOnce;
    if (s < stretches) {
      hash_blocks(hashes, rows, row_count, begin, smaller(blocks, begin + kBlocksAtOnce));
    }
  }
}

}  // namespace
}  // namespace fusedshard
