#include "fiber.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define ASAN_ONLY(statement) statement
#else
#define ASAN_ONLY(statement)
#endif

// Not __SANITIZE_THREAD__: were this file instrumented, the switches themselves would be races.
#if defined(EMULATION_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
}
#define TSAN_ONLY(statement) statement
#else
#define TSAN_ONLY(statement)
#endif

namespace emulation {
namespace {

// Sanitizers write their reports on the stack of the thread that they report.
constexpr size_t kStackBytes = 512 << 10;
constexpr size_t kGuardBytes = 4096;
[[maybe_unused]] constexpr unsigned kNoSynchronization = 1;

}  // namespace

Fiber::Fiber(void (*entry)()) {
  void* const mapped = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED || mprotect(mapped, kGuardBytes, PROT_NONE) != 0) {
    std::perror("emulated device: no memory for a stack");
    std::abort();
  }
  stack_ = static_cast<char*>(mapped) + kGuardBytes;
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack_;
  own_.uc_stack.ss_size = kStackBytes;
  own_.uc_link = nullptr;
  makecontext(&own_, entry, 0);
  // AddressSanitizer would forget what it knows of a stack at every switch if it knew the size.
  own_.uc_stack.ss_size = 0;
  TSAN_ONLY(own_tsan_ = __tsan_create_fiber(0);)
}

void Fiber::resume() {
  ASAN_ONLY(__sanitizer_start_switch_fiber(&caller_fake_stack_, stack_, kStackBytes);)
  TSAN_ONLY(caller_tsan_ = __tsan_get_current_fiber();)
  TSAN_ONLY(__tsan_switch_to_fiber(own_tsan_, kNoSynchronization);)
  swapcontext(&caller_, &own_);
  ASAN_ONLY(__sanitizer_finish_switch_fiber(caller_fake_stack_, nullptr, nullptr);)
}

void Fiber::leave() {
  ASAN_ONLY(__sanitizer_start_switch_fiber(&own_fake_stack_, caller_stack_, caller_stack_bytes_);)
  TSAN_ONLY(__tsan_switch_to_fiber(caller_tsan_, kNoSynchronization);)
  swapcontext(&own_, &caller_);
  // The caller may be another thread than before, with another stack.
  ASAN_ONLY(__sanitizer_finish_switch_fiber(own_fake_stack_, &caller_stack_, &caller_stack_bytes_);)
}

void Fiber::entered() {
  ASAN_ONLY(__sanitizer_finish_switch_fiber(nullptr, &caller_stack_, &caller_stack_bytes_);)
}

void release([[maybe_unused]] void* token) { TSAN_ONLY(__tsan_release(token);) }
void acquire([[maybe_unused]] void* token) { TSAN_ONLY(__tsan_acquire(token);) }

}  // namespace emulation
