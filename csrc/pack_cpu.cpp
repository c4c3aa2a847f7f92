#include "pack_cpu.h"

#include <omp.h>

#include <algorithm>
#include <cstring>

namespace fusedshard {
namespace {

// Below this many elements waking threads costs more than it saves.
constexpr int64_t kParallelGrain = 1 << 18;

// Calls body(begin, end) on equal parts of [0, numel), one a thread.
template <typename Body>
void in_parts(int64_t numel, int threads, const Body& body) {
  const int parts =
      static_cast<int>(std::clamp<int64_t>(numel / kParallelGrain, 1, std::max(1, threads)));
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
    const int64_t part = omp_get_thread_num();
    const int64_t count = omp_get_num_threads();
    body(numel * part / count, numel * (part + 1) / count);
  }
}

}  // namespace

void pack_cpu(char* out, const Segment* rows, int64_t row_count, int64_t numel, int64_t itemsize,
              int threads) {
  in_parts(numel, threads, [=](int64_t begin, int64_t end) {
    const auto zero = [=](int64_t from, int64_t to) {
      std::memset(out + from * itemsize, 0, static_cast<size_t>((to - from) * itemsize));
    };
    int64_t packed = begin;
    for (const Segment* row = rows; row < rows + row_count; ++row) {
      const int64_t from = std::max(row->start, begin);
      const int64_t to = std::min(row->start + row->length, end);
      if (from >= to || row->grad == 0) continue;
      zero(packed, from);
      const char* grad = reinterpret_cast<const char*>(row->grad) + (from - row->start) * itemsize;
      std::memcpy(out + from * itemsize, grad, static_cast<size_t>((to - from) * itemsize));
      packed = to;
    }
    zero(packed, end);
  });
}

void unpack_cpu(const char* in, const Segment* rows, int64_t row_count, int64_t numel,
                int64_t itemsize, int threads) {
  in_parts(numel, threads, [=](int64_t begin, int64_t end) {
    for (const Segment* row = rows; row < rows + row_count; ++row) {
      const int64_t from = std::max(row->start, begin);
      const int64_t to = std::min(row->start + row->length, end);
      if (from >= to || row->grad == 0) continue;
      char* grad = reinterpret_cast<char*>(row->grad) + (from - row->start) * itemsize;
      std::memcpy(grad, in + from * itemsize, static_cast<size_t>((to - from) * itemsize));
    }
  });
}

}  // namespace fusedshard
