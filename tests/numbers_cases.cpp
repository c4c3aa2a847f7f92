// Runs numbers.h over all floats (or all halves) and random.h on the known answers of its authors.
// The argument names the check; the program prints what does not hold, and then ends with status 1.
//
// References are in double, where a float's neighbours and the distances to them are exact.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "numbers.h"
#include "random.h"

namespace fusedshard {
namespace {

constexpr uint64_t kFloats = 1ull << 32;
constexpr uint64_t kHalves = 1ull << 16;
constexpr int64_t kBlock = 1 << 16;  // patterns

struct CheckWeights {
  CheckWeights() {
    for (uint32_t i = 0; i < kCodeBlock; ++i) at[i] = check_weight(i);
  }
  uint32_t at[kCodeBlock];
};

bool is_nan(uint32_t bits) { return (bits & kMagnitude) > kInfinity; }
uint32_t sign_of(uint32_t bits) { return bits >> 16 & 0x8000u; }

// Of a float's magnitude, given as bits; that of what follows the largest one, 2^128, is infinity.
double magnitude_of(uint32_t bits) {
  const double finite = from_bits(bits & kMagnitude);
  return (bits & kMagnitude) == kInfinity ? 0x1p128 : finite;
}

// The magnitude's rounding to bfloat16 and the sign, for what is not NaN.
uint32_t bfloat16_reference(uint32_t bits, bool ties_to_even) {
  const uint32_t below = bits & 0x7fff0000u;
  const double down = magnitude_of(bits) - magnitude_of(below);
  const double up = magnitude_of(below + 0x10000u) - magnitude_of(bits);
  const bool odd = (below >> 16 & 1u) != 0;
  const bool tie_goes_up = ties_to_even ? odd : true;
  const bool finite = below != kInfinity;
  const bool goes_up = finite & ((down > up) | ((down == up) & tie_goes_up));
  return ((below >> 16) + (goes_up ? 1u : 0u)) | sign_of(bits);
}

bool bfloat16_is_nearest(uint32_t bits) {
  const uint32_t got = to_bfloat16(from_bits(bits)).bits;
  return got == (is_nan(bits) ? 0x7fc0u : bfloat16_reference(bits, true));
}

// `&` and `|` for `&&` and `||` from here on: without branches the loop is vectorized.
bool master_survives(uint32_t bits) {
  BFloat16 value;
  int16_t remainder;
  split_master(from_bits(bits), value, remainder);
  const uint32_t joined = bits_of(join_master(value, remainder));
  const uint32_t wanted = bfloat16_reference(bits, false);
  const bool both_nan = ((value.bits & 0x7fffu) > 0x7f80u) & is_nan(joined);
  const bool survives = (value.bits == wanted) & (joined == bits);
  return is_nan(bits) ? both_nan : survives;
}

// Rounded in units of its last place; the default mode of rint is to even.
uint32_t half_reference(uint32_t bits) {
  const int32_t exponent = static_cast<int32_t>((bits & kMagnitude) >> 23) - 127;
  const int32_t raised = exponent < -14 ? -14 : exponent;
  const int32_t bounded = raised > 16 ? 16 : raised;
  const float unit = from_bits(static_cast<uint32_t>(bounded - 10 + 127) << 23);
  const double units = std::rint(magnitude_of(bits) / unit);
  const double code = units + (bounded + 14) * 1024.0;
  return static_cast<uint32_t>(static_cast<int32_t>(code < 0x7c00 ? code : 0x7c00)) | sign_of(bits);
}

bool half_is_nearest(uint32_t bits) {
  const uint32_t got = to_half(from_bits(bits)).bits;
  return got == (is_nan(bits) ? 0x7e00u | sign_of(bits) : half_reference(bits));
}

bool half_is_widened(uint32_t bits) {
  const float got = widen(Half{static_cast<uint16_t>(bits)});
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const int mantissa = static_cast<int>(bits & 1023u);
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? is_nan(bits_of(got)) : got == sign * HUGE_VAL;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return got == sign * value && std::signbit(got) == (sign < 0);
}

// Rounded up it must be where the random number is above what the part below is missing.
bool bfloat16_is_a_neighbour(uint32_t bits) {
  const float x = from_bits(bits);
  const uint32_t never = to_bfloat16_stochastic(x, 0).bits;
  const uint32_t always = to_bfloat16_stochastic(x, 0xffffu).bits;
  const uint32_t below = bits >> 16;
  const bool exact = (bits & 0xffffu) == 0;
  const uint32_t missing = 0x10000u - (bits & 0xffffu);
  const bool at_border = (to_bfloat16_stochastic(x, missing).bits == below + 1u) &
                         (to_bfloat16_stochastic(x, missing - 1u).bits == below);
  const bool holds = (never == below) & (always == below + (exact ? 0u : 1u)) & (exact | at_border);
  return is_nan(bits) ? (never == 0x7fc0u) & (always == 0x7fc0u) : holds;
}

// Of a number that changes by `difference`, and of two that differ by it and change places. Lower
// ones change the check by as much, with the other sign.
bool difference_is_seen(uint32_t difference) {
  if (difference == 0) return true;
  static const CheckWeights weights;
  uint32_t unseen = 0;
  for (int64_t i = 0; i < kCodeBlock; ++i) {
    unseen += weights.at[i] * difference == 0 ? 1 : 0;
    for (int64_t j = 0; j < i; ++j) {
      unseen += (weights.at[i] - weights.at[j]) * difference == 0 ? 1 : 0;
    }
  }
  return unseen == 0;
}

// Downwards, as NaN, where some faults are alone, are the largest patterns.
template <bool (*kHolds)(uint32_t)>
int sweep(uint64_t count) {
  std::atomic<int64_t> failing_block = -1;
#pragma omp parallel for
  for (int64_t block = static_cast<int64_t>(count) / kBlock - 1; block >= 0; --block) {
    if (failing_block >= 0) continue;
    const uint32_t start = static_cast<uint32_t>(block * kBlock);
    int32_t wrong = 0;
    for (int32_t i = 0; i < kBlock; ++i) wrong += kHolds(start + static_cast<uint32_t>(i)) ? 0 : 1;
    if (wrong != 0) failing_block = block;
  }
  if (failing_block < 0) return 0;
  uint32_t pattern = static_cast<uint32_t>(failing_block * kBlock);
  while (kHolds(pattern)) ++pattern;
  std::printf("it does not hold for %#x\n", pattern);
  return 1;
}

int expect(const char* what, RandomWords got, RandomWords want) {
  if (got.low == want.low && got.high == want.high) return 0;
  std::printf("%s: got %08x %08x, wanted %08x %08x\n", what, got.low, got.high, want.low,
              want.high);
  return 1;
}

// Random123's kat_vectors: zeros, ones, and digits of pi.
int philox() {
  const uint32_t ones = 0xffffffffu;
  int failures = expect("2x32", philox2x32(0, 0, 0), {0xff1dae59u, 0x6cd10df2u});
  failures += expect("2x32", philox2x32(ones, ones, ones), {0x2c3f628bu, 0xab4fd7adu});
  failures +=
      expect("2x32", philox2x32(0x243f6a88u, 0x85a308d3u, 0x13198a2eu), {0xdd7ce038u, 0xf62a4c12u});
  failures += expect("4x32", philox4x32(0, 0, 0, 0, 0, 0), {0x6627e8d5u, 0xe169c58du});
  failures +=
      expect("4x32", philox4x32(ones, ones, ones, ones, ones, ones), {0x408f276du, 0x41c83b0eu});
  failures += expect(
      "4x32",
      philox4x32(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u),
      {0xd16cfe09u, 0x94fdccebu});
  return failures == 0 ? 0 : 1;
}

int run(const char* check) {
  const auto is = [&](const char* name) { return std::strcmp(check, name) == 0; };
  if (is("bfloat16")) return sweep<bfloat16_is_nearest>(kFloats);
  if (is("stochastic")) return sweep<bfloat16_is_a_neighbour>(kFloats);
  if (is("master")) return sweep<master_survives>(kFloats);
  if (is("half")) return sweep<half_is_nearest>(kFloats);
  if (is("weights")) return sweep<difference_is_seen>(kHalves);
  if (is("widen")) return sweep<half_is_widened>(kHalves);
  if (is("philox")) return philox();
  std::printf("no check is named %s\n", check);
  return 2;
}

}  // namespace
}  // namespace fusedshard

int main(int argc, char** argv) { return argc == 2 ? fusedshard::run(argv[1]) : 2; }
