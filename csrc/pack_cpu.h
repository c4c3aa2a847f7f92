// Gradients into a send buffer and back. Copies only, so one build serves every instruction set.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace fusedshard {

// Fills `out` (numel elements of itemsize bytes) from the rows' gradients; rows are in ascending
// order. Zero where no row is, and where a row has no gradient (address 0).
void pack_cpu(char* out, const Segment* rows, int64_t row_count, int64_t numel, int64_t itemsize,
              int threads);

// The inverse: writes the rows' stretches of `in` to their gradients, where they have one.
void unpack_cpu(const char* in, const Segment* rows, int64_t row_count, int64_t numel,
                int64_t itemsize, int threads);

}  // namespace fusedshard
