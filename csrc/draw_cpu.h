// Streams of random.h on a CPU. Compilers do not find the multiplication of 32-bit lanes to 64 bits
// that Philox is made of, so it is named for each instruction set.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "random.h"

namespace fusedshard {
namespace {

#if defined(__AVX2__)
#if defined(__AVX512F__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
using Lanes = uint64_t __attribute__((vector_size(kLanes * sizeof(uint64_t))));
#if defined(__AVX512F__)
constexpr Lanes kLaneNumbers = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr Lanes kLaneNumbers = {0, 1, 2, 3};
#endif

// Of the lower halves.
inline Lanes product(Lanes a, Lanes b) {
#if defined(__AVX512F__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
  return reinterpret_cast<Lanes>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#pragma GCC diagnostic pop
#else
  return reinterpret_cast<Lanes>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}

// As random_words, for kLanes pairs from a multiple of kLanes on, which share the upper word of the
// counter. What is in the upper halves of lanes does not matter but at the end.
inline Lanes draw_lanes(const RandomKey& key, int64_t pair) {
  const Lanes zero = {};
  Lanes low = kLaneNumbers + static_cast<uint64_t>(pair);
  Lanes high = zero + (upper(static_cast<uint64_t>(pair)) ^ key.high);
  uint32_t round_key = key.key;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Lanes both = product(low, zero + kPhiloxMultiplier);
    low = both >> 32 ^ round_key ^ high;
    high = both;
    round_key += kPhiloxWeyl;
  }
  return (low & 0xffffffffu) | high << 32;
}
#endif

// Words [first, first + length) of a stream; `first` is even, and there is room for one word more.
inline void draw(uint32_t* words, const RandomKey& key, int64_t first, int64_t length) {
  int64_t at = 0;
#if defined(__AVX2__)
  for (; first / 2 % kLanes == 0 && at + 2 * kLanes <= length; at += 2 * kLanes) {
    const Lanes lanes = draw_lanes(key, (first + at) / 2);
    memcpy(words + at, &lanes, sizeof lanes);
  }
#endif
  for (; at < length; at += 2) {
    const RandomWords pair = random_words(key, (first + at) / 2);
    words[at] = pair.low;
    words[at + 1] = pair.high;
  }
}

// Half words likewise; `first` is a multiple of 4. Processors here store the lower half first.
inline const uint16_t* draw_halves(uint32_t* words, const RandomKey& key, int64_t first,
                                   int64_t length) {
  draw(words, key, first / 2, (length + 1) / 2);
  return reinterpret_cast<const uint16_t*>(words);
}

}  // namespace
}  // namespace fusedshard
