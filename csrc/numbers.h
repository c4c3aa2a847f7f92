// Numbers of fewer than 32 bits: bfloat16 and IEEE half precision, the signed remainder that makes
// a bfloat16 number a float again, and 8-bit codes that share an exponent.
//
// Integer arithmetic without branches, so that compilers vectorize it, every processor gives the
// same bits, and flushing of denormal numbers (torch.set_flush_denormal) changes nothing. In an
// anonymous namespace for the reason that adam.h gives.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FUSEDSHARD_HD __host__ __device__ __forceinline__
#else
#define FUSEDSHARD_HD inline __attribute__((always_inline))
#endif

namespace fusedshard {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// Elements of a parameter that share an exponent or a check, counted from its first one, so that
// blocks do not depend on how many ranks there are.
constexpr int64_t kCodeBlock = 128;

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;  // all but the sign
constexpr uint32_t kInfinity = 0x7f800000;

FUSEDSHARD_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

FUSEDSHARD_HD float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FUSEDSHARD_HD float widen(float x) { return x; }
FUSEDSHARD_HD double widen(double x) { return x; }
FUSEDSHARD_HD float widen(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }

FUSEDSHARD_HD float widen(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t rebased = (magnitude << 13) + (112u << 23);
  const uint32_t odd = rebased + (112u << 23);  // infinite or NaN
  const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = magnitude >= 0x7c00u ? odd : rebased;
  const uint32_t value = magnitude < 0x0400u ? small : normal;
  return from_bits(value | (static_cast<uint32_t>(x.bits) & 0x8000u) << 16);
}

// To the nearest, ties to even; NaN becomes torch's.
FUSEDSHARD_HD BFloat16 to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return {static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7fc0u : rounded)};
}

// Up or down in magnitude, with the probability that makes the expectation `x`. `random`: 16 bits.
FUSEDSHARD_HD BFloat16 to_bfloat16_stochastic(float x, uint32_t random) {
  const uint32_t bits = bits_of(x);
  return {static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7fc0u : (bits + random) >> 16)};
}

// To the nearest, ties to even.
FUSEDSHARD_HD Half to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the sum with 0.5 has the unit of a denormal half as its last place.
  const uint32_t small = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f);
  uint32_t rounded = magnitude < (113u << 23) ? small : normal;
  rounded = magnitude >= (143u << 23) ? 0x7c00u : rounded;
  rounded = magnitude > kInfinity ? 0x7e00u : rounded;
  return {static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000u))};
}

FUSEDSHARD_HD BFloat16 rounded_as(BFloat16, float x) { return to_bfloat16(x); }
FUSEDSHARD_HD Half rounded_as(Half, float x) { return to_half(x); }

// A number whose rounding stands beside it. Where that is another one, somebody has changed it, and
// it counts.
template <typename T>
FUSEDSHARD_HD float refreshed(float wide, T narrow) {
  return rounded_as(narrow, wide).bits == narrow.bits ? wide : widen(narrow);
}

// A float as a bfloat16 number, rounded to the nearest, ties away from zero, and a signed rest in
// units of the float's last place. Any float that is not NaN comes back to the bit; a NaN stays NaN
// in both, the same one everywhere: rounded up its bits could run over into those of zero, and
// checks would tell apart the payloads that processors choose.
//
// A remainder is of use with the very number that it was split from. Each block of numbers has a
// check, so that one sees where somebody has changed them.
FUSEDSHARD_HD void split_master(float master, BFloat16& value, int16_t& remainder) {
  const uint32_t bits = bits_of(master);
  const bool is_nan = (bits & kMagnitude) > kInfinity;
  const uint32_t high = is_nan ? 0x7fc0u : (bits + 0x8000u) >> 16;
  const uint32_t low = is_nan ? 0u : bits - (high << 16);
  value.bits = static_cast<uint16_t>(high);
  remainder = static_cast<int16_t>(static_cast<uint16_t>(low));
}

FUSEDSHARD_HD float join_master(BFloat16 value, int16_t remainder) {
  const uint32_t high = static_cast<uint32_t>(value.bits) << 16;
  return from_bits(high + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// The check of a block is the sum of its numbers' bits, each times a weight of its place.
FUSEDSHARD_HD constexpr uint32_t check_weight(uint32_t place) {
  uint32_t weight = (place + 1u) * 0x9e3779b9u;
  weight = (weight ^ weight >> 15) * 0x85ebca6bu;
  return (weight ^ weight >> 13) | 1u;
}

// 8-bit codes: floating-point numbers of 3 mantissa bits beside an exponent that the elements of a
// block share, stored as the exponent field of a float. It only ever changes by powers of two, so
// coding again what was decoded changes nothing.
//
//   exp_avg:     sign, 4 exponent bits, 3 mantissa bits, denormal numbers; down to 2^-17 of the
//                block's largest. 0x80 (no negative zero): NaN or infinity, read as NaN.
//   exp_avg_sq:  5 exponent bits, 3 mantissa bits, over 31 powers of two. 0 is zero alone: what is
//                smaller than the smallest code becomes that, as an update that divides by the
//                root of a lost exp_avg_sq would be huge. 255: infinity or NaN, read as infinity.
//
// The shared exponent is at least kLeastExponent, so that every decoded number is a normal one.
constexpr int32_t kLeastExponent = 40;
constexpr int32_t kMostExponent = 254;

// Bits of a magnitude to choose the exponent by; 0 where there is none.
FUSEDSHARD_HD int32_t code_magnitude(float x) {
  const uint32_t magnitude = bits_of(x) & kMagnitude;
  return static_cast<int32_t>(magnitude >= kInfinity ? 0u : magnitude);
}

FUSEDSHARD_HD int32_t clamp_exponent(int32_t exponent) {
  const int32_t least = exponent < kLeastExponent ? kLeastExponent : exponent;
  return least > kMostExponent ? kMostExponent : least;
}

struct SignedCode {
  // The exponent for a block whose largest magnitude has these bits: such that it, rounded up, is
  // at most the largest code, 1.875.
  static FUSEDSHARD_HD int32_t exponent(int32_t largest) {
    return clamp_exponent((largest + 0xfffff) >> 23);
  }

  static FUSEDSHARD_HD float decode(uint8_t code, int32_t exponent) {
    const uint32_t magnitude = code & 0x7fu;
    const bool denormal = magnitude < 8u;
    const uint32_t base = static_cast<uint32_t>(exponent - 14) << 23;
    const float shifted = from_bits(base + (magnitude << 20) - (denormal ? 0u : 1u << 23));
    const float value = shifted - (denormal ? from_bits(base) : 0.0f);
    const uint32_t bits = bits_of(value) | (code & 0x80u) << 24;
    return from_bits(code == 0x80u ? 0x7fc00000u : bits);
  }

  // `rounding`: what is added to 20 bits that are cut off then.
  template <typename Rounding>
  static FUSEDSHARD_HD uint8_t encode(float x, int32_t exponent, const Rounding& rounding) {
    const uint32_t bits = bits_of(x);
    const uint32_t magnitude = bits & kMagnitude;
    const uint32_t base = static_cast<uint32_t>(exponent - 14) << 23;
    const uint32_t normal = magnitude - base + (1u << 23);
    // In units of 2^-20 of the smallest denormal code.
    const float unit = from_bits(static_cast<uint32_t>(291 - exponent) << 23);
    const float below = magnitude < base ? from_bits(magnitude) : 0.0f;
    const uint32_t denormal = static_cast<uint32_t>(static_cast<int32_t>(below * unit));
    const uint32_t fixed = magnitude < base ? denormal : normal;
    const uint32_t rounded = (fixed + rounding(fixed)) >> 20;
    const uint32_t code = rounded > 0x7fu ? 0x7fu : rounded;
    const uint32_t with_sign = code == 0u ? 0u : code | (bits >> 24 & 0x80u);
    return static_cast<uint8_t>(magnitude >= kInfinity ? 0x80u : with_sign);
  }
};

struct UnsignedCode {
  // As above, where the largest code is 1.75.
  static FUSEDSHARD_HD int32_t exponent(int32_t largest) {
    return clamp_exponent((largest + 0x1fffff) >> 23);
  }

  static FUSEDSHARD_HD float decode(uint8_t code, int32_t exponent) {
    const uint32_t bits =
        (static_cast<uint32_t>(exponent - 31) << 23) + (static_cast<uint32_t>(code) << 20);
    const uint32_t or_infinite = code == 0xffu ? kInfinity : bits;
    return from_bits(code == 0u ? 0u : or_infinite);
  }

  template <typename Rounding>
  static FUSEDSHARD_HD uint8_t encode(float x, int32_t exponent, const Rounding& rounding) {
    const uint32_t magnitude = bits_of(x) & kMagnitude;
    const int32_t above =
        static_cast<int32_t>(magnitude) - static_cast<int32_t>(exponent - 31) * (1 << 23);
    const uint32_t fixed = above < (1 << 20) ? 1u << 20 : static_cast<uint32_t>(above);
    const uint32_t rounded = (fixed + rounding(fixed)) >> 20;
    const uint32_t code = rounded > 0xfeu ? 0xfeu : rounded;
    const uint32_t or_infinite = magnitude >= kInfinity ? 0xffu : code;
    return static_cast<uint8_t>(magnitude == 0u ? 0u : or_infinite);
  }
};

// To the nearest code, ties to even.
struct Nearest {
  FUSEDSHARD_HD uint32_t operator()(uint32_t fixed) const { return 0x7ffffu + (fixed >> 20 & 1u); }
};

// To either neighbour, so that the expectation is right. `random`: 16 bits.
struct Stochastic {
  uint32_t random;
  FUSEDSHARD_HD uint32_t operator()(uint32_t) const { return (random << 4) + 8u; }
};

}  // namespace
}  // namespace fusedshard
