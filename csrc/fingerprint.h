// A 64-bit hash of a tensor's bytes, which says whether two tensors are the same to the bit.
//
// The bytes are little-endian words of 64 bits, filled up with zeros to whole rounds of
// kFingerprintLanes words. A block is 32 rounds. Word i of a round goes into lane i, each lane is
// mixed once more at the end of its block, the lanes of a block are added, the sum is mixed with
// the block's number, and these are added, with one more number made of the length. Sums are mod
// 2^64, so that any number of threads gives the same bits in any order.
//
// Each function below is a bijection in each argument, and so is a sum. Therefore a change within
// one word, such as that of any one element or any one bit, changes the result with certainty, and
// so do zeros that are appended within a round. Other changes, such as the exchange of two
// elements, are missed with a probability of about 2^-64: nothing here is linear, so that changes
// of opposite sign, or of sign bits alone, do not cancel. It is no protection against an adversary,
// who could choose changes by the constants.
//
// For the anonymous namespace see adam.h.
#pragma once

#include "numbers.h"

namespace fusedshard {

constexpr int kFingerprintLanes = 64;
constexpr int64_t kWordBytes = 8;
constexpr int64_t kRoundBytes = kFingerprintLanes * kWordBytes;
constexpr int64_t kFingerprintBlock = 32 * kRoundBytes;  // bytes

// A tensor to hash. The layout is fixed, since Python hands rows over as an int64 array (n, 3).
struct FingerprintRow {
  int64_t address;
  int64_t bytes;
  int64_t first_block;  // how many blocks the rows before it have
};

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;      // 2^64 / golden ratio
constexpr uint64_t kLaneFactor = 0x9fb21c651e98df25u;  // odd, half of its bits are set

// The output of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators",
// OOPSLA 2014) in state x: every bit of x acts on every bit of the result.
constexpr FUSEDSHARD_HD uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr FUSEDSHARD_HD uint64_t lane_start(int lane) {
  return mix(kGolden * static_cast<uint64_t>(lane + 1));
}

// Takes a word into a lane. A product never reaches lower bits than its factor's lowest one, so the
// upper half is brought down first: else the highest bit, a float's sign, would stay alone. The
// shift is not 32, so that signs of the two floats in a word do not meet in one bit.
constexpr FUSEDSHARD_HD uint64_t lane_step(uint64_t lane, uint64_t word) {
  lane ^= word;
  return (lane ^ (lane >> 35)) * kLaneFactor;
}

// What a block adds to its tensor's hash. `lanes`: the sum of mix(lane).
constexpr FUSEDSHARD_HD uint64_t block_term(uint64_t lanes, int64_t block) {
  return mix(lanes + kGolden * static_cast<uint64_t>(block));
}

// What the length adds.
constexpr FUSEDSHARD_HD uint64_t length_term(int64_t bytes) {
  return mix(~(kGolden * static_cast<uint64_t>(bytes)));
}

constexpr FUSEDSHARD_HD int64_t fingerprint_blocks(int64_t bytes) {
  return (bytes + kFingerprintBlock - 1) / kFingerprintBlock;
}

// The row that a block belongs to: the last of those that begin with it or before, since rows
// without blocks come before the next one.
FUSEDSHARD_HD int64_t row_of_block(const FingerprintRow* rows, int64_t row_count, int64_t block) {
  int64_t low = 0;
  int64_t high = row_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (rows[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}

}  // namespace
}  // namespace fusedshard
