// Gradients into a send buffer and back, for every size of an element.
#include <algorithm>

#include "drive.h"
#include "pack_cpu.h"

namespace drive {
namespace {

struct Shape {
  int64_t first_gap;   // before the first segment, and then growing by one
  int64_t shift;       // of the buffer
  int64_t grad_shift;  // of the first gradient, and then growing by one
  int64_t tail;        // behind the last segment
};

template <typename U>
Array<U> random_bits(Random& random, int64_t length, int64_t shift) {
  Array<U> array(length, shift);
  for (int64_t i = 0; i < length; ++i) array[i] = static_cast<U>(random.below(INT64_MAX));
  return array;
}

template <typename U>
void check(Random& random, const std::vector<int64_t>& lengths, const Shape& shape) {
  std::vector<Segment> rows, cpu_rows;
  std::vector<Array<U>> gradients, cpu_gradients;
  int64_t end = 0;
  for (int64_t s = 0; s < static_cast<int64_t>(lengths.size()); ++s) {
    Segment row{};
    row.start = end + (shape.first_gap + s) % 4;
    row.length = lengths[s];
    end = row.start + row.length;
    gradients.push_back(random_bits<U>(random, row.length, (shape.grad_shift + s) % kWidth<U>));
    cpu_gradients.emplace_back(gradients.back(), 0);
    const bool has_gradient = random.below(4) != 0;
    row.grad = has_gradient ? gradients.back().address() : 0;
    rows.push_back(row);
    row.grad = has_gradient ? cpu_gradients.back().address() : 0;
    cpu_rows.push_back(row);
  }
  rows.shrink_to_fit();
  const std::vector<Tile> tiles = tiles_of(rows);
  const auto row_count = static_cast<int64_t>(rows.size());
  const auto tile_count = static_cast<int64_t>(tiles.size());
  const int64_t numel = end + shape.tail;
  constexpr int64_t kItem = sizeof(U);
  const std::string what = "pack of " + std::to_string(kItem) + " bytes";

  const Array<U> sent = random_bits<U>(random, numel, shape.shift);
  const Array<U> wanted(sent, 0);
  pack_cuda(reinterpret_cast<char*>(sent.data()), rows.data(), tiles.data(), tile_count, numel,
            kItem, next_stream());
  pack_cpu(reinterpret_cast<char*>(wanted.data()), cpu_rows.data(), row_count, numel, kItem, 1);
  expect_same(what, sent, wanted);

  const Array<U> received = random_bits<U>(random, numel, shape.shift);
  const auto* in = reinterpret_cast<const char*>(received.data());
  unpack_cuda(in, rows.data(), tiles.data(), tile_count, kItem, next_stream());
  unpack_cpu(in, cpu_rows.data(), row_count, numel, kItem, 1);
  for (size_t s = 0; s < rows.size(); ++s) {
    expect_same("un" + what, gradients[s], cpu_gradients[s]);
  }
}

template <typename U>
void check_all(Random& random) {
  std::vector<int64_t> lengths = kLengths;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::rotate(lengths.begin(), lengths.begin() + 1, lengths.end());
    for (int64_t shift = 0; shift < kWidth<U>; ++shift) {
      const auto at = static_cast<int64_t>(i);
      check<U>(random, lengths, {at, shift, (at + shift) % kWidth<U>, shift % 3});
    }
  }
  // One segment, aligned as the buffer is, and as it is not.
  for (int64_t length : kLengths) {
    check<U>(random, {length}, {0, 1, 1, 0});
    check<U>(random, {length}, {1, 0, 1, 300});
    check<U>(random, {length}, {1, 0, 0, 0});
  }
  for (int64_t numel : {0, 300}) check<U>(random, {}, {0, 1, 0, numel});
}

}  // namespace

void run_all() {
  Random random;
  check_all<uint16_t>(random);
  check_all<uint32_t>(random);
  check_all<uint64_t>(random);
}

}  // namespace drive
