// The formats of mixed precision on a GPU: each array is read and written once, and fp32 values
// live in registers only. How parameters and masters lie in memory is the same for a whole launch,
// so branches on it cost little; the format of the moments is a template argument.
#pragma once

#include "adam_tiles.cuh"

namespace fusedshard {
namespace {

// Neighbouring elements of a thread: one access of 16-bit numbers or of codes, two of floats.
constexpr int kEach = 8;
constexpr int kBlockThreads = kCodeBlock / kEach;  // that share an exponent
static_assert(kTileElements % kCodeBlock == 0 && kWarp % kBlockThreads == 0,
              "blocks of codes lie within tiles and within warps");

template <typename T>
struct Eight {
  T at[kEach];
};

struct MixedWork : Work<float> {
  RandomKey random;
};

// The elements of a thread. Registers are scarce: only the number of the first in its segment is
// kept, and the rest is in shared memory.
struct Place {
  const MixedWork& work;
  int64_t in_segment;

  // Number of the first in the arrays.
  __device__ __forceinline__ int64_t at() const { return work.segment.start + in_segment; }
  // In the parameter's storage order.
  __device__ __forceinline__ int64_t in_param() const { return work.segment.first + in_segment; }
  // How many of kEach there are; may be less than none.
  __device__ __forceinline__ int present() const {
    const int64_t rest = work.segment.length - in_segment;
    return static_cast<int>(rest < kEach ? rest : kEach);
  }
};

// One by one where not all are there, with zeros for those that are not.
template <typename T>
__device__ __forceinline__ Eight<T> load_eight(const T* x, int present, bool whole_vectors = true) {
  Eight<T> eight{};
  if (present >= kEach && whole_vectors) {
    for (int from = 0; from < kEach; from += Vector<T>::kWidth) {
      const Vector<T> vector = load(x + from);
      for (int k = 0; k < Vector<T>::kWidth; ++k) eight.at[from + k] = vector.at[k];
    }
  } else {
    for (int k = 0; k < kEach; ++k) {
      if (k < present) eight.at[k] = x[k];
    }
  }
  return eight;
}

template <typename T>
__device__ __forceinline__ void store_eight(T* to, const Eight<T>& eight, int present) {
  if (present >= kEach) {
    for (int from = 0; from < kEach; from += Vector<T>::kWidth) {
      Vector<T> vector;
      for (int k = 0; k < Vector<T>::kWidth; ++k) vector.at[k] = eight.at[from + k];
      store(to + from, vector);
    }
  } else {
    for (int k = 0; k < kEach; ++k) {
      if (k < present) to[k] = eight.at[k];
    }
  }
}

template <typename T>
__device__ __forceinline__ Eight<float> widen_eight(const Eight<T>& x) {
  Eight<float> wide;
  for (int k = 0; k < kEach; ++k) wide.at[k] = widen(x.at[k]);
  return wide;
}

template <typename T>
__device__ __forceinline__ Eight<float> read_gradient(const Place& place) {
  const T* const from = reinterpret_cast<const T*>(place.work.segment.grad);
  return widen_eight(load_eight(from + place.in_segment, place.present(), aligned(from)));
}

__device__ __forceinline__ Eight<float> read_gradient(Format param_format, const Place& place) {
  if (place.work.segment.wide != 0 || param_format == Format::kFloat) {
    return read_gradient<float>(place);
  }
  return param_format == Format::kBFloat16 ? read_gradient<BFloat16>(place)
                                           : read_gradient<Half>(place);
}

template <typename T>
__device__ __forceinline__ Eight<float> refreshed_eight(Eight<float> master,
                                                        const Eight<T>& param) {
  for (int k = 0; k < kEach; ++k) master.at[k] = refreshed(master.at[k], param.at[k]);
  return master;
}

template <typename T>
__device__ __forceinline__ Eight<float> read_narrow_param(const MixedArrays& a,
                                                          const Place& place) {
  const auto param = load_eight(static_cast<const T*>(a.param) + place.at(), place.present());
  if (a.master_format != Format::kFloat) return widen_eight(param);
  return refreshed_eight(
      load_eight(static_cast<const float*>(a.master) + place.at(), place.present()), param);
}

// All threads of a warp meet here. Elements that are not there are zero, and add nothing.
__device__ __forceinline__ uint32_t shared_check(const Eight<BFloat16>& param) {
  uint32_t first = threadIdx.x % kBlockThreads * kEach;
  uint32_t sum = 0;
  for (int k = 0; k < kEach; ++k) {
    asm("" : "+r"(first));  // else what all weights begin with is kept in registers, which spill
    sum += check_weight(first + k) * param.at[k].bits;
  }
  for (int lanes = kBlockThreads / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  }
  return sum;
}

__device__ __forceinline__ Eight<float> read_joined_param(const MixedArrays& a,
                                                          const Place& place) {
  const auto param =
      load_eight(static_cast<const BFloat16*>(a.param) + place.at(), place.present());
  const auto rest = load_eight(static_cast<const int16_t*>(a.master) + place.at(), place.present());
  const uint32_t check = shared_check(param);
  // Remainders of blocks that somebody has changed do not count.
  const bool valid = place.present() > 0 && a.checks[place.at() / kCodeBlock] == check;
  Eight<float> joined;
  for (int k = 0; k < kEach; ++k) {
    joined.at[k] = join_master(param.at[k], valid ? rest.at[k] : int16_t{0});
  }
  return joined;
}

__device__ __forceinline__ Eight<float> read_param(const MixedArrays& a, const Place& place) {
  if (a.param_format == Format::kFloat) {
    return load_eight(static_cast<const float*>(a.param) + place.at(), place.present());
  }
  if (a.master_format == Format::kRemainder) return read_joined_param(a, place);
  return a.param_format == Format::kBFloat16 ? read_narrow_param<BFloat16>(a, place)
                                             : read_narrow_param<Half>(a, place);
}

// Half words of a stream for the elements from number `first` of a parameter on.
__device__ __forceinline__ Eight<uint32_t> draw_halves(const RandomKey& key, int64_t first) {
  Eight<uint32_t> halves;
  for (int k = 0; k < kEach; k += 4) {
    const RandomWords words = random_words(key, first / 4 + k / 4);
    halves.at[k] = words.low & 0xffffu;
    halves.at[k + 1] = words.low >> 16;
    halves.at[k + 2] = words.high & 0xffffu;
    halves.at[k + 3] = words.high >> 16;
  }
  return halves;
}

// Words likewise.
__device__ __forceinline__ Eight<uint32_t> draw(const RandomKey& key, int64_t first) {
  Eight<uint32_t> drawn;
  for (int k = 0; k < kEach; k += 2) {
    const RandomWords words = random_words(key, first / 2 + k / 2);
    drawn.at[k] = words.low;
    drawn.at[k + 1] = words.high;
  }
  return drawn;
}

template <typename T>
__device__ __forceinline__ void write_rounded_param(const MixedArrays& a, const Place& place,
                                                    const Eight<float>& value) {
  Eight<T> param;
  for (int k = 0; k < kEach; ++k) param.at[k] = rounded_as(T{}, value.at[k]);
  store_eight(static_cast<T*>(a.param) + place.at(), param, place.present());
}

__device__ __forceinline__ void write_random_param(const MixedArrays& a, const Place& place,
                                                   const Eight<float>& value) {
  const auto random = draw_halves(key_of_params(place.work.random), place.in_param());
  Eight<BFloat16> param;
  for (int k = 0; k < kEach; ++k) {
    param.at[k] = to_bfloat16_stochastic(value.at[k], random.at[k]);
  }
  store_eight(static_cast<BFloat16*>(a.param) + place.at(), param, place.present());
}

__device__ __forceinline__ void write_split_param(const MixedArrays& a, const Place& place,
                                                  const Eight<float>& value) {
  Eight<BFloat16> param;
  Eight<int16_t> rest;
  for (int k = 0; k < kEach; ++k) {
    split_master(value.at[k], param.at[k], rest.at[k]);
    if (k >= place.present()) param.at[k].bits = 0;
  }
  const uint32_t check = shared_check(param);
  __syncwarp();  // the others may still read the last check
  if (threadIdx.x % kBlockThreads == 0 && place.present() > 0) {
    a.checks[place.at() / kCodeBlock] = check;
  }
  store_eight(static_cast<BFloat16*>(a.param) + place.at(), param, place.present());
  store_eight(static_cast<int16_t*>(a.master) + place.at(), rest, place.present());
}

__device__ __forceinline__ void write_param(const MixedArrays& a, const Place& place,
                                            const Eight<float>& value) {
  const bool is_float = a.param_format == Format::kFloat;
  if (is_float || a.master_format == Format::kFloat) {
    store_eight(static_cast<float*>(is_float ? a.param : a.master) + place.at(), value,
                place.present());
  }
  if (is_float) return;
  if (a.master_format == Format::kRemainder) {
    write_split_param(a, place, value);
  } else if (a.param_format == Format::kHalf) {
    write_rounded_param<Half>(a, place, value);
  } else if (a.master_format == Format::kNone && a.stochastic != 0) {
    write_random_param(a, place, value);
  } else {
    write_rounded_param<BFloat16>(a, place, value);
  }
}

// Up or down at random, or to the nearest.
struct Rounding {
  bool stochastic;
  uint32_t random;  // 16 bits

  __device__ __forceinline__ uint32_t operator()(uint32_t fixed) const {
    return stochastic ? Stochastic{random}(fixed) : Nearest{}(fixed);
  }
};

// What rounds the moments of a thread's elements.
struct Roundings {
  bool stochastic;
  Eight<uint32_t> words;

  template <int kShift>
  __device__ __forceinline__ Rounding of(int k) const {
    return {stochastic, words.at[k] >> kShift & 0xffffu};
  }
};

// Code: as a moment is coded, where it is.
template <typename M, typename Code>
__device__ __forceinline__ Eight<float> read_moment(const Moment& moment, const Place& place) {
  const auto stored =
      load_eight(static_cast<const M*>(moment.values) + place.at(), place.present());
  if constexpr (sizeof(M) > 1) {
    return widen_eight(stored);
  } else {
    const int32_t exponent = place.present() > 0 ? moment.exponents[place.at() / kCodeBlock] : 0;
    const int32_t valid = clamp_exponent(exponent);
    Eight<float> value;
    for (int k = 0; k < kEach; ++k) value.at[k] = Code::decode(stored.at[k], valid);
    return value;
  }
}

// All threads of a warp meet here. Elements that are not there are zero or NaN, and change nothing.
template <typename Code>
__device__ __forceinline__ int32_t shared_exponent(const Eight<float>& value) {
  int32_t largest = 0;
  for (int k = 0; k < kEach; ++k) {
    const int32_t magnitude = code_magnitude(value.at[k]);
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int lanes = kBlockThreads / 2; lanes > 0; lanes /= 2) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, largest, lanes);
    largest = other > largest ? other : largest;
  }
  return Code::exponent(largest);
}

template <typename Code, int kShift>
__device__ __forceinline__ Eight<uint8_t> encode_eight(const Moment& moment, const Place& place,
                                                       const Eight<float>& value,
                                                       const Roundings& roundings) {
  const int32_t exponent = shared_exponent<Code>(value);
  __syncwarp();  // the others may still read the last exponent
  if (threadIdx.x % kBlockThreads == 0 && place.present() > 0) {
    moment.exponents[place.at() / kCodeBlock] = static_cast<uint8_t>(exponent);
  }
  Eight<uint8_t> codes;
  for (int k = 0; k < kEach; ++k) {
    codes.at[k] = Code::encode(value.at[k], exponent, roundings.of<kShift>(k));
  }
  return codes;
}

template <int kShift>
__device__ __forceinline__ Eight<BFloat16> round_eight(const Eight<float>& value,
                                                       const Roundings& roundings) {
  Eight<BFloat16> rounded;
  for (int k = 0; k < kEach; ++k) {
    const Rounding rounding = roundings.of<kShift>(k);
    rounded.at[k] = rounding.stochastic ? to_bfloat16_stochastic(value.at[k], rounding.random)
                                        : to_bfloat16(value.at[k]);
  }
  return rounded;
}

// kShift: of the 16 bits that round this moment in a word.
template <typename M, typename Code, int kShift>
__device__ __forceinline__ void write_moment(const Moment& moment, const Place& place,
                                             const Eight<float>& value,
                                             const Roundings& roundings) {
  M* const to = static_cast<M*>(moment.values) + place.at();
  if constexpr (std::is_same_v<M, float>) {
    store_eight(to, value, place.present());
  } else if constexpr (std::is_same_v<M, BFloat16>) {
    store_eight(to, round_eight<kShift>(value, roundings), place.present());
  } else {
    store_eight(to, encode_eight<Code, kShift>(moment, place, value, roundings), place.present());
  }
}

}  // namespace
}  // namespace fusedshard
