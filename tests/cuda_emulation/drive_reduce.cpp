// Means of chunks, sums of squares and the search for infinite values, at all lengths and
// alignments.
#include "dispatch_cpu.h"
#include "drive.h"

namespace drive {
namespace {

// Whether it is computed with as it is. Fewer lengths of the others are tried.
template <typename T>
constexpr bool kIsWide = std::is_same_v<T, Wide<T>>;

template <typename T>
std::vector<int64_t> lengths_of() {
  return kIsWide<T> ? kLengths : std::vector<int64_t>{7, 4096, 8192 + 3};
}

// Of `n` chunks that begin `stride` elements apart. out: the chunk that becomes the mean, or -1
// for an array of its own.
template <typename T>
void check_mean(Random& random, int64_t n, int64_t length, int64_t padding, int64_t out) {
  const int64_t stride = length + padding;
  const Array<T> chunks =
      random_array<T>(random, (n - 1) * stride + length, random.below(kWidth<T>));
  const Array<T> copy(chunks, 0);
  const Array<Wide<T>> own(length, random.below(kWidth<Wide<T>>));
  const Array<Wide<T>> wanted_own(length);
  Wide<T>* to = own.data();
  Wide<T>* wanted_to = wanted_own.data();
  if constexpr (kIsWide<T>) {
    if (out >= 0) to = chunks.data() + out * stride;
    if (out >= 0) wanted_to = copy.data() + out * stride;
  }
  std::vector<const T*> copies;
  for (int64_t c = 0; c < n; ++c) copies.push_back(copy.data() + c * stride);
  mean_cuda<T>(to, chunks.data(), stride, n, length, next_stream());
  mean_cpu<T>(wanted_to, copies, length, 1);
  const std::string what = "mean " + type_name<T>() + " of " + std::to_string(n);
  if (out < 0) expect_same(what, own, wanted_own);
  expect_same(what + ", chunks", chunks, copy);
}

template <typename T>
void check_means(Random& random) {
  for (int64_t length : lengths_of<T>()) {
    for (int64_t n = 1; n <= 5; ++n) {
      for (int64_t padding : {0, 1, 4}) {
        check_mean<T>(random, n, length, padding, -1);
        if (kIsWide<T>) check_mean<T>(random, n, length, padding, random.below(n));
      }
    }
  }
}

template <typename T>
void check_square_sum(Random& random, int64_t length, int64_t shift) {
  const Array<T> x(length, shift);
  for (int64_t i = 0; i < length; ++i) x[i] = random.number<T>();
  const Array<double> workspace(square_sum_workspace(length));
  const Array<double> wanted(1);
  wanted[0] = square_sum_cpu(x.data(), length, 1);
  square_sum_cuda<T>(workspace.data(), x.data(), length, next_stream());
  const Array<double> sum(1);
  sum[0] = workspace[workspace.length() - 1];
  expect_same("square_sum " + type_name<T>() + " of " + std::to_string(length), sum, wanted);
}

// With one value that is not finite, `at` some place, or none where at < 0.
template <typename T>
void check_found_inf(Random& random, int64_t length, int64_t shift, int64_t at) {
  const Array<T> x(length, shift);
  for (int64_t i = 0; i < length; ++i) x[i] = random.number<T>();
  using Limits = std::numeric_limits<double>;
  if (at >= 0) {
    x[at] = convert<T>(random.below(2) == 0 ? Limits::quiet_NaN() : -Limits::infinity());
  }
  for (float before : {0.0f, 1.0f}) {
    const Array<float> found(1), wanted(1);
    found[0] = before;
    wanted[0] = non_finite_cpu(x.data(), length, 1) ? 1.0f : before;
    found_inf_cuda<T>(found.data(), x.data(), length, next_stream());
    expect_same("found_inf " + type_name<T>() + " of " + std::to_string(length), found, wanted);
  }
}

// Where some of the narrow numbers are not the wide ones' roundings.
template <typename T>
void check_refresh(Random& random) {
  for (int64_t length : lengths_of<T>()) {
    for (int64_t shift = 0; shift < kWidth<T>; ++shift) {
      const Array<T> narrow = random_array<T>(random, length, shift);
      const Array<float> wide(length, random.below(2) == 0 ? shift % kWidth<float> : 1);
      for (int64_t i = 0; i < length; ++i) {
        wide[i] = widen(narrow[i]) * (random.below(3) == 0 ? 1.5f : 1.0f + 0x1p-14f);
      }
      const Array<float> wanted(wide, 0);
      refresh_cuda<T>(wide.data(), narrow.data(), length, next_stream());
      refresh_cpu<T>(wanted.data(), narrow.data(), length, 1);
      expect_same("refresh " + type_name<T>() + " of " + std::to_string(length), wide, wanted);
    }
  }
}

template <typename T>
void check_sums(Random& random) {
  std::vector<int64_t> lengths = lengths_of<T>();
  lengths.push_back(0);
  for (int64_t length : lengths) {
    for (int64_t shift = 0; shift < kWidth<T>; shift += kIsWide<T> ? 1 : 3) {
      check_square_sum<T>(random, length, shift);
      check_found_inf<T>(random, length, shift, -1);
      if (length == 0) continue;
      for (int64_t at : {int64_t{0}, length / 2, length - 1}) {
        check_found_inf<T>(random, length, shift, at);
      }
    }
  }
  // More blocks of a partial sum than warps that run at once.
  check_square_sum<T>(random, 100 * kSumBlock + 77, 1);
}

}  // namespace

void run_all() {
  Random random;
  check_means<float>(random);
  check_means<double>(random);
  check_means<BFloat16>(random);
  check_means<Half>(random);
  check_sums<float>(random);
  check_sums<double>(random);
  check_sums<BFloat16>(random);
  check_sums<Half>(random);
  check_refresh<BFloat16>(random);
  check_refresh<Half>(random);
  // Partial sums of partial sums of partial sums.
  check_square_sum<float>(random, kSumBlock * kSumBlock + 1, 0);
}

}  // namespace drive
