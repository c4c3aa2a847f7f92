#include "block.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 gridDim;

namespace emulation {
namespace {

enum class State { kReady, kAtBarrier, kAtShuffle, kReturned };

struct Thread {
  Thread(unsigned index, void (*entry)()) : fiber(entry), index(index) {}

  void set_waiting(State in, const char* call_name, Where stands) {
    state = in;
    call = call_name;
    where = stands;
  }

  Fiber fiber;
  unsigned index;
  State state = State::kReady;
  // Of the call in which it waits for others, and what that returns.
  const char* call = "";
  Where where{};
  bool vote = false;
  unsigned mask = 0;
  unsigned source_lane = 0;
  unsigned warp_meetings = 0;
  uint64_t bits = 0;
  uint64_t result = 0;
};

// Kept for the next launches; the first `thread_count` make up a block.
std::vector<std::unique_ptr<Thread>> threads;
unsigned thread_count = 0;
Thread* running = nullptr;
const std::function<void()>* kernel = nullptr;
uint64_t block_epoch = 0;
unsigned returned = 0;
unsigned at_barrier = 0;
unsigned barriers_passed = 0;
// What hands writes on from one thread to others. Two for barriers, also of a warp, in turns: a
// thread may reach the next one before the others have left the last.
char start_token, end_token, barrier_tokens[2], warp_tokens[kWarp][2];

[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Where where, const char* format, ...) {
  std::fprintf(stderr, "emulated device: %s:%d: block %u, thread %u: ", where.file, where.line,
               blockIdx.x, running->index);
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  std::abort();
}

// Lets the others run until one of them has made this thread ready.
void leave_until_ready(Thread* self) {
  while (self->state != State::kReady) self->fiber.leave();
}

void open_barrier_if_all_came() {
  if (at_barrier == 0 || at_barrier + returned < thread_count) return;
  const Thread* first = nullptr;
  bool any = false;
  for (unsigned i = 0; i < thread_count; ++i) {
    const Thread& thread = *threads[i];
    if (thread.state != State::kAtBarrier) continue;
    if (first == nullptr) first = &thread;
    if (thread.where.line != first->where.line ||
        std::string(thread.where.file) != first->where.file) {
      fail(thread.where, "threads wait at different barriers: %u here, %u at %s:%d", thread.index,
           first->index, first->where.file, first->where.line);
    }
    any |= thread.vote;
  }
  if (returned > 0) {
    fail(first->where, "%s after %u of %u threads have returned", first->call, returned,
         thread_count);
  }
  for (unsigned i = 0; i < thread_count; ++i) {
    threads[i]->state = State::kReady;
    threads[i]->result = any;
  }
  at_barrier = 0;
  ++barriers_passed;
}

void shuffle_if_all_came(unsigned first_of_warp, unsigned mask, Where where) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    const unsigned index = first_of_warp + lane;
    if (index >= thread_count || threads[index]->state == State::kReturned) {
      fail(where, "the mask 0x%08x of a shuffle has lane %u, which is not there", mask, lane);
    }
    const Thread& thread = *threads[index];
    if (thread.state != State::kAtShuffle) return;
    if (thread.where.line != where.line) {
      fail(where, "lanes of a warp meet in different calls, lane %u in %s at %s:%d", lane,
           thread.call, thread.where.file, thread.where.line);
    }
    if (thread.mask != mask) {
      fail(where, "lanes of a warp shuffle with different masks, 0x%08x and 0x%08x", mask,
           thread.mask);
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    Thread& thread = *threads[first_of_warp + lane];
    if ((mask >> thread.source_lane & 1) == 0) {
      fail(where, "lane %u reads lane %u, which is not in the mask 0x%08x", lane,
           thread.source_lane, mask);
    }
    thread.result = threads[first_of_warp + thread.source_lane]->bits;
    thread.state = State::kReady;
  }
}

[[noreturn]] void report_hang() {
  std::map<std::string, std::vector<unsigned>> places;
  for (unsigned i = 0; i < thread_count; ++i) {
    const Thread& thread = *threads[i];
    std::string place = "returned";
    if (thread.state != State::kReturned) {
      place = std::string("waiting in ") + thread.call + " at " + thread.where.file + ":" +
              std::to_string(thread.where.line);
    }
    places[place].push_back(i);
  }
  std::fprintf(stderr, "emulated device: block %u hangs\n", blockIdx.x);
  for (const auto& [place, indices] : places) {
    std::fprintf(stderr, "  %zu threads, the first %u: %s\n", indices.size(), indices[0],
                 place.c_str());
  }
  std::abort();
}

// What a fiber does: the same thread of one block after another.
void thread_main() {
  running->fiber.entered();
  for (;;) {
    acquire(&start_token);
    (*kernel)();
    release(&end_token);
    running->state = State::kReturned;
    ++returned;
    open_barrier_if_all_came();  // which is a mistake that it reports
    running->fiber.leave();
  }
}

void shuffle_order(std::vector<unsigned>& order, std::mt19937_64* random) {
  if (random != nullptr) std::shuffle(order.begin(), order.end(), *random);
}

std::vector<unsigned> numbers_below(unsigned count) {
  std::vector<unsigned> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0u);
  return numbers;
}

void run_block(unsigned block, std::vector<unsigned>& order, std::mt19937_64* random) {
  blockIdx = {block, 0, 0};
  ++block_epoch;
  returned = 0;
  at_barrier = 0;
  for (unsigned i = 0; i < thread_count; ++i) threads[i]->state = State::kReady;
  release(&start_token);
  while (returned < thread_count) {
    bool progress = false;
    shuffle_order(order, random);
    for (unsigned i : order) {
      if (threads[i]->state != State::kReady) continue;
      progress = true;
      running = threads[i].get();
      threadIdx = {i, 0, 0};
      running->fiber.resume();
    }
    if (!progress) report_hang();
  }
  acquire(&end_token);
}

}  // namespace

bool meet_block(bool value, const char* name, Where where) {
  Thread* const self = running;
  self->vote = value;
  self->set_waiting(State::kAtBarrier, name, where);
  ++at_barrier;
  char* const token = &barrier_tokens[barriers_passed % 2];
  release(token);
  open_barrier_if_all_came();
  leave_until_ready(self);
  acquire(token);
  return self->result != 0;
}

// Lanes hand over their bits and nothing else: a shuffle orders no writes to memory.
uint64_t shuffle(unsigned mask, uint64_t bits, unsigned source, const char* name, Where where) {
  Thread* const self = running;
  const unsigned lane = self->index % kWarp;
  if ((mask >> lane & 1) == 0) fail(where, "lane %u is not in its own mask 0x%08x", lane, mask);
  self->bits = bits;
  self->mask = mask;
  self->source_lane = source < kWarp ? source : lane;
  self->set_waiting(State::kAtShuffle, name, where);
  shuffle_if_all_came(self->index - lane, mask, where);
  leave_until_ready(self);
  return self->result;
}

void meet_warp(const char* name, Where where) {
  Thread* const self = running;
  char* const token = &warp_tokens[self->index / kWarp][self->warp_meetings++ % 2];
  release(token);
  shuffle(0xffffffffu, 0, self->index % kWarp, name, where);
  acquire(token);
}

void enter_shared(uint64_t& epoch, void* memory, size_t bytes) {
  if (epoch == block_epoch) return;
  epoch = block_epoch;
  // Byte by byte, since ThreadSanitizer takes a memset for one by this thread of the block.
  volatile unsigned char* byte = static_cast<unsigned char*>(memory);
  for (size_t i = 0; i < bytes; ++i) byte[i] = 0xff;
}

void run_grid(unsigned blocks, unsigned block_threads, const std::function<void()>& body,
              std::mt19937_64* random) {
  kernel = &body;
  thread_count = block_threads;
  gridDim = dim3(blocks);
  while (threads.size() < thread_count) {
    threads.push_back(std::make_unique<Thread>(static_cast<unsigned>(threads.size()), thread_main));
  }
  std::vector<unsigned> order = numbers_below(thread_count);
  std::vector<unsigned> block_order = numbers_below(blocks);
  shuffle_order(block_order, random);
  for (unsigned block : block_order) run_block(block, order, random);
}

}  // namespace emulation
