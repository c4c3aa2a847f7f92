// The update: every kind of group, arrays aligned alike and not, segments of all lengths, and each
// of them once as the last, which ends where the arrays' memory does.
#include <algorithm>
#include <cmath>

#include "dispatch_cpu.h"
#include "drive.h"

namespace drive {
namespace {

const std::vector<int64_t> kSteps = {0, 1, 7, 1000, 123456};  // of the parameters
const char* const kNames[] = {"param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"};

// lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize
std::vector<Group> make_groups(bool has_max) {
  const double amsgrad = has_max ? 1 : 0;
  return {{1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0, 0},
          {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0, 1},
          {1e-2, 0.0, 0.99, 1e-6, 0.0, 0, amsgrad, 0},
          {1e-3, 0.3, 0.95, 0.0, 0.1, 1, amsgrad, 1},
          {1e-1, 0.95, 0.9, 1e-3, 0.2, 0, amsgrad, 0}};
}

template <typename T>
struct Table {
  std::vector<Segment> rows;
  std::vector<Array<T>> gradients;  // of the active rows
  int64_t numel = 0;
};

// Segments with gaps between them. Some are inactive, but never the last.
template <typename T>
Table<T> make_table(Random& random, const std::vector<int64_t>& lengths) {
  Table<T> table;
  const auto params = static_cast<int64_t>(kSteps.size());
  const auto groups = static_cast<int64_t>(make_groups(false).size());
  for (size_t s = 0; s < lengths.size(); ++s) {
    Segment row{};
    row.start = table.numel + random.below(4);
    row.length = lengths[s];
    row.param = random.below(params);
    row.group = random.below(groups);
    row.active = s + 1 == lengths.size() || random.below(5) != 0;
    if (row.active != 0) {
      table.gradients.push_back(random_array<T>(random, row.length, random.below(kWidth<T>)));
      row.grad = table.gradients.back().address();
    }
    table.rows.push_back(row);
    table.numel = row.start + row.length;
  }
  table.rows.shrink_to_fit();
  return table;
}

// param, exp_avg, exp_avg_sq and, if there is a fourth shift, max_exp_avg_sq.
template <typename T>
struct State {
  State(Random& random, int64_t numel, const std::vector<int64_t>& shifts) {
    for (int64_t shift : shifts) arrays.push_back(random_array<T>(random, numel, shift));
    for (size_t i = 2; i < arrays.size(); ++i) {
      for (int64_t k = 0; k < numel; ++k) arrays[i][k] = std::abs(arrays[i][k]);
    }
  }
  State(const State& other) {
    for (const Array<T>& array : other.arrays) arrays.emplace_back(array, 0);
  }
  AdamArrays<T> pointers() const {
    return {arrays[0].data(), arrays[1].data(), arrays[2].data(),
            arrays.size() > 3 ? arrays[3].data() : nullptr};
  }
  std::vector<Array<T>> arrays;
};

template <typename T>
void check(const std::string& what, Random& random, const std::vector<int64_t>& lengths,
           const std::vector<int64_t>& shifts) {
  const Table<T> table = make_table<T>(random, lengths);
  const std::vector<Tile> tiles = tiles_of(table.rows);
  const std::vector<Group> groups = make_groups(shifts.size() > 3);
  const State<T> device(random, table.numel, shifts);
  const State<T> cpu(device);
  const double device_grad_scale = random.below(2) == 0 ? 1.0 : 0.5;
  const float found_inf = random.below(4) == 0 ? 1.0f : 0.0f;
  const bool given = found_inf != 0.0f || random.below(2) == 0;
  adam_cuda<T>(
      device.pointers(),
      {table.rows.data(), tiles.data(), static_cast<int64_t>(tiles.size()), kSteps.data(),
       groups.data()},
      {0.75, device_grad_scale == 1.0 ? nullptr : &device_grad_scale, given ? &found_inf : nullptr},
      next_stream());
  if (found_inf == 0.0f) {
    adam_cpu<T>(cpu.pointers(), table.rows.data(), static_cast<int64_t>(table.rows.size()),
                kSteps.data(), groups.data(), 0.75 * device_grad_scale, 1);
  }
  for (size_t i = 0; i < shifts.size(); ++i) {
    expect_same(what + ", " + kNames[i], device.arrays[i], cpu.arrays[i]);
  }
}

template <typename T>
void check_all(Random& random, size_t arrays) {
  const std::string what = "adam " + type_name<T>() + (arrays > 3 ? " amsgrad" : "");
  std::vector<std::vector<int64_t>> all_shifts;
  for (int64_t s = 0; s < kWidth<T>; ++s) all_shifts.emplace_back(arrays, s);
  std::vector<int64_t> unlike(arrays, 1);
  for (size_t i = 0; i < arrays; ++i) {
    all_shifts.push_back(unlike);
    all_shifts.back()[i] = 0;
  }
  std::vector<int64_t> lengths = kLengths;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::rotate(lengths.begin(), lengths.begin() + 1, lengths.end());
    for (const auto& shifts : all_shifts) check<T>(what, random, lengths, shifts);
  }
  // A block takes several stretches of one segment, one after the other.
  for (const auto& shifts : all_shifts) {
    check<T>(what + ", long", random, {13 * kTileElements + 5}, shifts);
  }
}

}  // namespace

void run_all() {
  Random random;
  for (size_t arrays : {3, 4}) {
    check_all<float>(random, arrays);
    check_all<double>(random, arrays);
  }
}

}  // namespace drive
