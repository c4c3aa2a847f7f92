// The update in mixed precision on a CPU. Included once for each instruction set, by
// kernels_cpu.cpp.
//
// Formats are brought to fp32 and back in pieces that stay in the first-level cache, around the
// loop that fp32 has: memory is read and written once, and there is a loop for each format, not for
// each combination of them. Arrays that are fp32 already are worked on where they lie.
#pragma once

#include "draw_cpu.h"
#include "loops_cpu.h"

namespace fusedshard {
namespace {

constexpr int64_t kPiece = 512;  // elements; whole blocks of codes
static_assert(kPiece % kCodeBlock == 0, "pieces are whole blocks");

// A piece in fp32, and its random numbers.
struct Scratch {
  alignas(64) float param[kPiece];
  alignas(64) float gradient[kPiece];
  alignas(64) float moments[3][kPiece];
  alignas(64) uint32_t words[kPiece + 1];
  alignas(64) uint32_t param_words[kPiece / 2 + 1];
};

template <typename T>
void widen_all(float* __restrict out, const T* __restrict x, int64_t length) {
  for (int64_t i = 0; i < length; ++i) out[i] = widen(x[i]);
}

// `length` numbers of an array in a narrower format, from `at` on.
inline void widen_from(float* out, const void* array, Format format, int64_t at, int64_t length) {
  if (format == Format::kBFloat16) {
    widen_all(out, static_cast<const BFloat16*>(array) + at, length);
  } else {
    widen_all(out, static_cast<const Half*>(array) + at, length);
  }
}

inline const float* read_gradient(float* scratch, const MixedRun& run, Format param_format,
                                  int64_t at, int64_t length) {
  const auto* gradient = reinterpret_cast<const void*>(run.segment->grad);
  if (run.segment->wide != 0 || param_format == Format::kFloat) {
    return static_cast<const float*>(gradient) + at;
  }
  widen_from(scratch, gradient, param_format, at, length);
  return scratch;
}

struct CheckWeights {
  uint32_t at[kCodeBlock];
  constexpr CheckWeights() : at{} {
    for (uint32_t i = 0; i < kCodeBlock; ++i) at[i] = check_weight(i);
  }
};
constexpr CheckWeights kCheckWeights;

inline uint32_t check_of(const BFloat16* param, int64_t length) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < length; ++i) sum += kCheckWeights.at[i] * param[i].bits;
  return sum;
}

inline void join_all(float* __restrict out, const BFloat16* __restrict param,
                     const int16_t* __restrict remainder, int64_t length) {
  for (int64_t i = 0; i < length; ++i) out[i] = join_master(param[i], remainder[i]);
}

// Remainders of blocks that somebody has changed do not count.
inline void join_valid(float* out, const BFloat16* param, const int16_t* remainder,
                       const uint32_t* checks, int64_t length) {
  for (int64_t from = 0; from < length; from += kCodeBlock) {
    const int64_t size = smaller(kCodeBlock, length - from);
    if (check_of(param + from, size) == checks[from / kCodeBlock]) {
      join_all(out + from, param + from, remainder + from, size);
    } else {
      widen_all(out + from, param + from, size);
    }
  }
}

inline void write_checks(uint32_t* checks, const BFloat16* param, int64_t length) {
  for (int64_t from = 0; from < length; from += kCodeBlock) {
    checks[from / kCodeBlock] = check_of(param + from, smaller(kCodeBlock, length - from));
  }
}

inline void split_all(BFloat16* __restrict param, int16_t* __restrict remainder,
                      const float* __restrict master, int64_t length) {
  for (int64_t i = 0; i < length; ++i) split_master(master[i], param[i], remainder[i]);
}

template <typename T>
void refresh_all(float* __restrict wide, const T* __restrict narrow, int64_t length) {
  for (int64_t i = 0; i < length; ++i) wide[i] = refreshed(wide[i], narrow[i]);
}

template <typename T, typename Round>
void round_all(T* __restrict out, const float* __restrict x, int64_t length, const Round& round) {
  for (int64_t i = 0; i < length; ++i) out[i] = round(x[i]);
}

// Where the fp32 values of parameters are to be updated.
inline float* read_param(float* scratch, const MixedArrays& a, int64_t at, int64_t length) {
  if (a.param_format == Format::kFloat) return static_cast<float*>(a.param) + at;
  auto* bf16 = static_cast<BFloat16*>(a.param) + at;
  auto* half = static_cast<Half*>(a.param) + at;
  if (a.master_format == Format::kRemainder) {
    const auto* remainder = static_cast<int16_t*>(a.master) + at;
    join_valid(scratch, bf16, remainder, a.checks + at / kCodeBlock, length);
    return scratch;
  }
  if (a.master_format == Format::kNone) {
    widen_from(scratch, a.param, a.param_format, at, length);
    return scratch;
  }
  float* master = static_cast<float*>(a.master) + at;
  if (a.param_format == Format::kBFloat16) {
    refresh_all(master, bf16, length);
  } else {
    refresh_all(master, half, length);
  }
  return master;
}

inline void write_bfloat16(BFloat16* __restrict out, const float* __restrict x, int64_t length) {
  round_all(out, x, length, [](float value) { return to_bfloat16(value); });
}

template <typename Bits>
void write_bfloat16(BFloat16* __restrict out, const float* __restrict x, int64_t length,
                    const Bits& random) {
  for (int64_t i = 0; i < length; ++i) out[i] = to_bfloat16_stochastic(x[i], random(i));
}

// `random`: null to round to the nearest.
inline void write_param(const MixedArrays& a, const float* value, int64_t at, int64_t length,
                        const uint16_t* random) {
  if (a.param_format == Format::kFloat) return;
  auto* bf16 = static_cast<BFloat16*>(a.param) + at;
  auto* half = static_cast<Half*>(a.param) + at;
  if (a.master_format == Format::kRemainder) {
    split_all(bf16, static_cast<int16_t*>(a.master) + at, value, length);
    write_checks(a.checks + at / kCodeBlock, bf16, length);
  } else if (a.param_format == Format::kHalf) {
    round_all(half, value, length, [](float x) { return to_half(x); });
  } else if (random == nullptr) {
    write_bfloat16(bf16, value, length);
  } else {
    write_bfloat16(bf16, value, length, [=](int64_t i) { return random[i]; });
  }
}

template <typename Code>
void decode_all(float* __restrict out, const uint8_t* __restrict codes,
                const uint8_t* __restrict exponents, int64_t length) {
  for (int64_t from = 0; from < length; from += kCodeBlock) {
    const int32_t exponent = exponents[from / kCodeBlock];
    // Of a block that was never written: all of its codes are zero.
    const int32_t valid = clamp_exponent(exponent);
    const int64_t to = smaller(length, from + kCodeBlock);
    for (int64_t i = from; i < to; ++i) out[i] = Code::decode(codes[i], valid);
  }
}

template <typename Code, typename Rounding>
void encode_all(uint8_t* __restrict codes, uint8_t* __restrict exponents, const float* __restrict x,
                int64_t length, const Rounding& rounding) {
  for (int64_t from = 0; from < length; from += kCodeBlock) {
    const int64_t to = smaller(length, from + kCodeBlock);
    int32_t largest = 0;
    for (int64_t i = from; i < to; ++i) {
      const int32_t magnitude = code_magnitude(x[i]);
      largest = magnitude > largest ? magnitude : largest;
    }
    const int32_t exponent = Code::exponent(largest);
    exponents[from / kCodeBlock] = static_cast<uint8_t>(exponent);
    for (int64_t i = from; i < to; ++i) codes[i] = Code::encode(x[i], exponent, rounding(i));
  }
}

template <typename Code>
float* read_moment(float* scratch, const Moment& moment, Format format, int64_t at,
                   int64_t length) {
  if (format == Format::kFloat) return static_cast<float*>(moment.values) + at;
  if (format == Format::kBFloat16) {
    widen_from(scratch, moment.values, format, at, length);
  } else {
    decode_all<Code>(scratch, static_cast<uint8_t*>(moment.values) + at,
                     moment.exponents + at / kCodeBlock, length);
  }
  return scratch;
}

// `words`: of which 16 bits from kShift on are used; null to round to the nearest.
template <typename Code, int kShift>
void write_moment(const Moment& moment, Format format, const float* value, int64_t at,
                  int64_t length, const uint32_t* __restrict words) {
  const auto random = [=](int64_t i) { return words[i] >> kShift & 0xffffu; };
  auto* bf16 = static_cast<BFloat16*>(moment.values) + at;
  auto* codes = static_cast<uint8_t*>(moment.values) + at;
  auto* exponents = moment.exponents + at / kCodeBlock;
  if (format == Format::kBFloat16 && words == nullptr) {
    write_bfloat16(bf16, value, length);
  } else if (format == Format::kBFloat16) {
    write_bfloat16(bf16, value, length, random);
  } else if (format == Format::kCode && words == nullptr) {
    encode_all<Code>(codes, exponents, value, length, [](int64_t) { return Nearest{}; });
  } else if (format == Format::kCode) {
    encode_all<Code>(codes, exponents, value, length,
                     [=](int64_t i) { return Stochastic{random(i)}; });
  }
}

// Elements [from, from + length) of a run.
inline void mixed_piece(const MixedArrays& a, const MixedRun& run, int64_t from, int64_t length,
                        Scratch& scratch) {
  const int64_t at = run.segment->start + from;
  const Format format = a.moment_format;
  const bool amsgrad = run.group->amsgrad != 0.0;
  const float* g = read_gradient(scratch.gradient, run, a.param_format, from, length);
  float* p = read_param(scratch.param, a, at, length);
  float* m = read_moment<SignedCode>(scratch.moments[0], a.exp_avg, format, at, length);
  float* v = read_moment<UnsignedCode>(scratch.moments[1], a.exp_avg_sq, format, at, length);
  float* vmax = nullptr;
  if (amsgrad) {
    vmax = read_moment<UnsignedCode>(scratch.moments[2], a.max_exp_avg_sq, format, at, length);
  }
  const auto loop = amsgrad ? adam_loop<float, true> : adam_loop<float, false>;
  loop(p, g, m, v, vmax, length, run.scalars);
  const int64_t first = run.segment->first + from;
  const uint16_t* halves = nullptr;
  if (a.stochastic != 0 && a.param_format == Format::kBFloat16 &&
      a.master_format == Format::kNone) {
    halves = draw_halves(scratch.param_words, key_of_params(run.random), first, length);
  }
  write_param(a, p, at, length, halves);
  const uint32_t* words = nullptr;
  if (a.stochastic != 0 && format != Format::kFloat) {
    draw(scratch.words, run.random, first, length);
    words = scratch.words;
  }
  write_moment<SignedCode, 0>(a.exp_avg, format, m, at, length, words);
  write_moment<UnsignedCode, 16>(a.exp_avg_sq, format, v, at, length, words);
  if (amsgrad) {
    // To the nearest, so that it only grows where exp_avg_sq does.
    write_moment<UnsignedCode, 16>(a.max_exp_avg_sq, format, vmax, at, length, nullptr);
  }
}

// Where blocks of codes meet next.
inline int64_t to_block(int64_t element, int64_t length) {
  return smaller((element + kCodeBlock - 1) / kCodeBlock * kCodeBlock, length);
}

inline void adam_mixed(const MixedArrays& arrays, const MixedRun* runs, int64_t run_count,
                       int threads) {
  for_stretches(runs, run_count, threads, [&](const MixedRun& run, int64_t from, int64_t to) {
    const int64_t length = run.segment->length;
    const int64_t end = to_block(to, length);
    Scratch scratch;
    for (int64_t at = to_block(from, length); at < end; at += kPiece) {
      mixed_piece(arrays, run, at, smaller(kPiece, end - at), scratch);
    }
  });
}

}  // namespace
}  // namespace fusedshard
