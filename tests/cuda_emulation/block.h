// Runs the blocks of a grid one after another, the threads of a block in turns.
#pragma once

#include <cuda_runtime.h>

#include <random>

namespace emulation {

// Calls body() as every thread of a grid of `blocks` blocks of `threads` threads. Blocks, and the
// threads of a block, come in order, or in any order that `random` (may be null) gives. A mistake
// in how threads meet ends the process with a message.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body,
              std::mt19937_64* random);

}  // namespace emulation
