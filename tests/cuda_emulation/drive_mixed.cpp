// The update in mixed precision: every combination of formats, segments of all lengths and places,
// and gradients that lie anywhere.
#include <algorithm>

#include "dispatch_cpu.h"
#include "drive.h"

namespace drive {
namespace {

const std::vector<int64_t> kSteps = {0, 1, 7, 1000, 123456};  // of the parameters
// Below, at and beyond a thread's elements, a block of codes and a tile.
const std::vector<int64_t> kMixedLengths = {1, 7, 8, 129, 1000, 4095, 2 * 4096 + 13};
// Without eps what is zero everywhere becomes NaN: behind a segment's end, too.
const std::vector<Group> kGroups = {{1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0, 0},
                                    {1e-2, 0.3, 0.99, 0, 0.1, 0, 0, 1}};
const std::vector<Group> kAmsgradGroups = {{1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1, 0}, kGroups[1]};

struct Options {
  Format master;
  bool amsgrad;
  bool stochastic;
};

template <typename T>
constexpr Format kFormat = std::is_same_v<T, float>      ? Format::kFloat
                           : std::is_same_v<T, BFloat16> ? Format::kBFloat16
                           : std::is_same_v<T, Half>     ? Format::kHalf
                                                         : Format::kCode;

template <typename P>
struct Table {
  std::vector<Segment> rows;
  std::vector<Array<P>> gradients;
  std::vector<Array<float>> wide_gradients;
  int64_t numel = 0;
};

// Some are inactive, but never the last.
template <typename P>
Table<P> make_table(Random& random, const std::vector<int64_t>& lengths, int64_t alignment) {
  Table<P> table;
  for (size_t s = 0; s < lengths.size(); ++s) {
    Segment row{};
    row.start = ((table.numel + alignment - 1) / alignment + random.below(2)) * alignment;
    row.length = lengths[s];
    row.first = random.below(int64_t{1} << 40) * kCodeBlock;
    row.param = random.below(static_cast<int64_t>(kSteps.size()));
    row.group = random.below(2);
    row.active = s + 1 == lengths.size() || random.below(5) != 0;
    row.wide = random.below(2);
    if (row.active != 0 && row.wide != 0) {
      const auto shift = random.below(2) * random.below(kWidth<float>);
      table.wide_gradients.push_back(random_array<float>(random, row.length, shift));
      row.grad = table.wide_gradients.back().address();
    } else if (row.active != 0) {
      const auto shift = random.below(2) * random.below(kWidth<P>);
      table.gradients.push_back(random_array<P>(random, row.length, shift));
      row.grad = table.gradients.back().address();
    }
    table.rows.push_back(row);
    table.numel = row.start + row.length;
  }
  table.rows.shrink_to_fit();
  return table;
}

// exp_avg and its exponents, or with `positive` one of the others.
template <typename M>
Array<M> make_moment(Random& random, int64_t numel, bool positive) {
  Array<M> moment(numel);
  for (int64_t i = 0; i < numel; ++i) {
    if constexpr (std::is_integral_v<M>) {
      moment[i] = static_cast<M>(random.below(256));
    } else {
      const auto value = widen(random.value<M>());
      moment[i] = convert<M>(positive ? std::abs(value) : value);
    }
  }
  return moment;
}

int64_t blocks_of(int64_t numel) { return (numel + kCodeBlock - 1) / kCodeBlock; }

// As of bf16 parameters. Those of two blocks in three are right, the others off by a bit.
template <typename P>
Array<uint32_t> make_checks(Random& random, const std::vector<Segment>& rows,
                            const Array<P>& param) {
  Array<uint32_t> checks(blocks_of(param.length()));
  for (int64_t b = 0; b < checks.length(); ++b) checks[b] = static_cast<uint32_t>(b);
  for (const Segment& row : rows) {
    for (int64_t from = 0; from < row.length; from += kCodeBlock) {
      uint32_t sum = 0;
      for (int64_t i = from; i < std::min(from + kCodeBlock, row.length); ++i) {
        const uint32_t bits = to_bfloat16(widen(param[row.start + i])).bits;
        sum += check_weight(static_cast<uint32_t>(i - from)) * bits;
      }
      const bool right = random.below(3) != 0;
      checks[(row.start + from) / kCodeBlock] = right ? sum : sum ^ 1u << random.below(32);
    }
  }
  return checks;
}

Array<uint8_t> make_exponents(Random& random, int64_t numel) {
  Array<uint8_t> exponents(blocks_of(numel));
  for (int64_t b = 0; b < exponents.length(); ++b) {
    exponents[b] = static_cast<uint8_t>(random.below(5) == 0 ? 0 : 100 + random.below(30));
  }
  return exponents;
}

// P: parameters, M: moments. All masters are there, of which one or none is used.
template <typename P, typename M>
struct State {
  State(Random& random, int64_t numel, const std::vector<Segment>& rows)
      : param(random_array<P>(random, numel)),
        master(numel),
        remainder(numel),
        checks(make_checks(random, rows, param)) {
    for (int64_t i = 0; i < numel; ++i) {
      // Now and then the parameter is not the master's rounding.
      master[i] = widen(param[i]) * (random.below(3) == 0 ? 1.0f + 0x1p-7f : 1.0f + 0x1p-14f);
      remainder[i] = static_cast<int16_t>(random.below(65536));
    }
    for (int which = 0; which < 3; ++which) {
      moments.push_back(make_moment<M>(random, numel, which > 0));
      exponents.push_back(make_exponents(random, numel));
    }
  }
  State(const State& other)
      : param(other.param, 0),
        master(other.master, 0),
        remainder(other.remainder, 0),
        checks(other.checks, 0) {
    for (int which = 0; which < 3; ++which) {
      moments.emplace_back(other.moments[which], 0);
      exponents.emplace_back(other.exponents[which], 0);
    }
  }

  MixedArrays pointers(const Options& options) const {
    const auto moment = [&](int which) {
      return Moment{moments[which].data(), exponents[which].data()};
    };
    void* const masters[] = {nullptr, master.data(), remainder.data()};
    const int chosen = options.master == Format::kNone    ? 0
                       : options.master == Format::kFloat ? 1
                                                          : 2;
    uint32_t* const checks_used = chosen == 2 ? checks.data() : nullptr;
    return {param.data(),       masters[chosen],  checks_used,
            moment(0),          moment(1),        options.amsgrad ? moment(2) : Moment{},
            kFormat<P>,         options.master,   kFormat<M>,
            options.stochastic, 0x123456789abcdef};
  }

  Array<P> param;
  Array<float> master;
  Array<int16_t> remainder;
  Array<uint32_t> checks;
  std::vector<Array<M>> moments;
  std::vector<Array<uint8_t>> exponents;
};

template <typename P, typename M>
void check(Random& random, const Options& options, const std::vector<int64_t>& lengths) {
  const bool in_blocks = std::is_integral_v<M> || options.master == Format::kRemainder;
  const int64_t alignment = in_blocks ? kCodeBlock : kWidth<BFloat16>;
  const Table<P> table = make_table<P>(random, lengths, alignment);
  const std::vector<Tile> tiles = tiles_of(table.rows);
  const std::vector<Group>& groups = options.amsgrad ? kAmsgradGroups : kGroups;
  const State<P, M> device(random, table.numel, table.rows);
  const State<P, M> cpu(device);
  const double device_grad_scale = 0.5;
  const float found_inf = random.below(8) == 0 ? 1.0f : 0.0f;
  adam_mixed_cuda(device.pointers(options),
                  {table.rows.data(), tiles.data(), static_cast<int64_t>(tiles.size()),
                   kSteps.data(), groups.data()},
                  {0.75, &device_grad_scale, &found_inf}, next_stream());
  if (found_inf == 0.0f) {
    adam_mixed_cpu(cpu.pointers(options), table.rows.data(),
                   static_cast<int64_t>(table.rows.size()), kSteps.data(), groups.data(),
                   0.75 * device_grad_scale, 1);
  }
  const std::string what = "adam_mixed " + type_name<P>() + ", moments " + type_name<M>() +
                           ", master " + std::to_string(static_cast<int>(options.master)) +
                           (options.amsgrad ? ", amsgrad" : "") +
                           (options.stochastic ? ", stochastic" : "");
  expect_same(what + ", param", device.param, cpu.param);
  expect_same(what + ", master", device.master, cpu.master);
  expect_same(what + ", remainder", device.remainder, cpu.remainder);
  expect_same(what + ", checks", device.checks, cpu.checks);
  for (int which = 0; which < 3; ++which) {
    const std::string moment = ", moment " + std::to_string(which);
    expect_same(what + moment + ", exponents", device.exponents[which], cpu.exponents[which]);
    expect_same(what + moment, device.moments[which], cpu.moments[which]);
  }
}

// The lengths are rotated from one combination to the next, so that others end the arrays.
template <typename P>
void check_all(Random& random, std::vector<int64_t>& lengths, const std::vector<Format>& masters) {
  for (Format master : masters) {
    for (int switches = 0; switches < 4; ++switches) {
      const Options options{master, switches % 2 != 0, switches / 2 != 0};
      check<P, float>(random, options, lengths);
      check<P, BFloat16>(random, options, lengths);
      check<P, uint8_t>(random, options, lengths);
      std::rotate(lengths.begin(), lengths.begin() + 1, lengths.end());
    }
  }
}

}  // namespace

void run_all() {
  Random random;
  std::vector<int64_t> lengths = kMixedLengths;
  check_all<float>(random, lengths, {Format::kNone});
  check_all<BFloat16>(random, lengths, {Format::kNone, Format::kFloat, Format::kRemainder});
  check_all<Half>(random, lengths, {Format::kNone, Format::kFloat});
}

}  // namespace drive
