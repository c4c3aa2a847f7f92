// Words that travel as kernel arguments, and the count of steps.
#include "drive.h"

namespace drive {
namespace {

void check_write_words(Random& random, int64_t count) {
  const Array<int64_t> words(count);
  for (int64_t i = 0; i < count; ++i) words[i] = random.below(INT64_MAX);
  const Array<int64_t> written(count);
  write_words_cuda(written.data(), words.data(), count, next_stream());
  expect_same("write_words of " + std::to_string(count), written, words);
}

void check_count_steps(Random& random, int64_t count, const float* found_inf) {
  const bool counts = found_inf == nullptr || *found_inf == 0.0f;
  const Array<int64_t> steps(count), used(count), wanted(count);
  const Array<float> mirror(count), wanted_mirror(count);
  for (int64_t i = 0; i < count; ++i) {
    steps[i] = random.below(int64_t{1} << 30);
    used[i] = random.below(2);
    wanted[i] = steps[i] + (counts ? used[i] : 0);
    mirror[i] = -1.0f;
    wanted_mirror[i] = counts ? static_cast<float>(wanted[i]) : -1.0f;
  }
  count_steps_cuda(steps.data(), mirror.data(), used.data(), count, found_inf, next_stream());
  expect_same("count_steps of " + std::to_string(count), steps, wanted);
  expect_same("count_steps of " + std::to_string(count) + ", mirror", mirror, wanted_mirror);
}

}  // namespace

void run_all() {
  Random random;
  const float flags[] = {0.0f, 1.0f};
  // Around what one launch carries, and around what one grid counts at once.
  for (int64_t count : {0, 1, 3, 255, 257, 479, 480, 481, 960, 1003, 6 * 256 + 1, 4000}) {
    check_write_words(random, count);
    for (const float* found_inf : {static_cast<const float*>(nullptr), flags, flags + 1}) {
      check_count_steps(random, count, found_inf);
    }
  }
}

}  // namespace drive
