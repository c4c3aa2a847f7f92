// Fingerprints of many arrays at once, of all lengths and alignments.
#include "dispatch_cpu.h"
#include "drive.h"

namespace drive {
namespace {

constexpr int64_t kBlock = kFingerprintBlock;

// `lengths`: bytes; each array begins the next of `shifts` bytes past a 16-byte boundary.
void check(Random& random, const std::vector<int64_t>& lengths,
           const std::vector<int64_t>& shifts) {
  std::vector<Array<uint8_t>> arrays;
  std::vector<FingerprintRow> rows;
  int64_t blocks = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    arrays.emplace_back(lengths[i], shifts[i % shifts.size()]);
    for (int64_t at = 0; at < lengths[i]; ++at) {
      arrays.back()[at] = static_cast<uint8_t>(random.below(256));
    }
    rows.push_back({arrays.back().address(), lengths[i], blocks});
    blocks += fingerprint_blocks(lengths[i]);
  }
  rows.shrink_to_fit();  // so that AddressSanitizer sees its end
  const auto count = static_cast<int64_t>(rows.size());
  const Array<uint64_t> hashes(count), wanted(count), terms(blocks);
  fingerprints_cuda(hashes.data(), terms.data(), rows.data(), count, blocks, next_stream());
  fingerprints_cpu(wanted.data(), rows.data(), count, 1);
  expect_same("fingerprints", hashes, wanted);
}

}  // namespace

void run_all() {
  Random random;
  std::vector<int64_t> lengths;
  for (int64_t edge : {int64_t{0}, int64_t{8}, kRoundBytes, kBlock - kRoundBytes, 2 * kBlock}) {
    for (int64_t by : {-9, -1, 0, 1, 3, 8}) {
      if (edge + by >= 0) lengths.push_back(edge + by);
    }
  }
  for (int64_t shift = 0; shift < 16; ++shift) check(random, lengths, {shift});
  check(random, {}, {0});
  check(random, {0}, {0});
  check(random, {0, 0, 5, 0, 3 * kBlock + 77, 0}, {0, 1, 8});
  // More blocks, and more rows, than there are warps and blocks of threads; and a row with more
  // blocks than a block has threads.
  check(random, std::vector<int64_t>(300, 13), {0, 4, 7});
  check(random, {7, 260 * kBlock + 3, 9}, {0});
}

}  // namespace drive
