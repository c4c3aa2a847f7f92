// Random numbers that are a function of where they are used: seed, step, parameter, element. So
// every rank, thread and world size rounds an element alike. Philox: Salmon et al., "Parallel
// Random Numbers: As Easy as 1, 2, 3" (SC 2011), with 10 rounds.
#pragma once

#include "numbers.h"

namespace fusedshard {

// What is the same for all elements of a parameter in a step.
struct RandomKey {
  uint32_t key;
  uint32_t high;  // mixed into the upper word of the counter
};

struct RandomWords {
  uint32_t low;
  uint32_t high;
};

namespace {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultiplier = 0xd256d193u;
constexpr uint32_t kPhiloxWeyl = 0x9e3779b9u;  // added to the key after each round

FUSEDSHARD_HD uint32_t upper(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// Philox2x32-10.
FUSEDSHARD_HD RandomWords philox2x32(uint32_t low, uint32_t high, uint32_t key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product = static_cast<uint64_t>(kPhiloxMultiplier) * low;
    low = upper(product) ^ key ^ high;
    high = static_cast<uint32_t>(product);
    key += kPhiloxWeyl;
  }
  return {low, high};
}

// The first two words of Philox4x32-10.
FUSEDSHARD_HD RandomWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                     uint32_t k0, uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = 0xd2511f53ull * c0;
    const uint64_t second = 0xcd9e8d57ull * c2;
    c0 = upper(second) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(second);
    c2 = upper(first) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(first);
    k0 += kPhiloxWeyl;
    k1 += 0xbb67ae85u;
  }
  return {c0, c1};
}

FUSEDSHARD_HD RandomKey random_key(int64_t seed, int64_t step, int64_t param) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](int64_t x) { return upper(static_cast<uint64_t>(x)); };
  const RandomWords words =
      philox4x32(low(step), high(step), low(param), high(param), low(seed), high(seed));
  return {words.low, words.high};
}

// A stream of 32-bit words: these are number 2 * pair and the one behind. What rounds moments takes
// the word of an element's number in its parameter's storage order: the lower half for exp_avg, the
// upper half for exp_avg_sq. What rounds parameters takes the half word of that number from a
// stream of its own.
FUSEDSHARD_HD RandomWords random_words(const RandomKey& key, int64_t pair) {
  const auto counter = static_cast<uint64_t>(pair);
  return philox2x32(static_cast<uint32_t>(counter), upper(counter) ^ key.high, key.key);
}

FUSEDSHARD_HD RandomKey key_of_params(const RandomKey& key) {
  return {key.key, key.high ^ 0x80000000u};
}

}  // namespace
}  // namespace fusedshard
