// A stack of its own on which a function runs in turns with its caller, and what the sanitizers
// have to be told about that.
#pragma once

#include <ucontext.h>

#include <cstddef>

namespace emulation {

class Fiber {
 public:
  // `entry` never returns. A fiber is never destroyed: it runs kernels until the process ends.
  explicit Fiber(void (*entry)());
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();   // called outside of fibers: runs this one until it calls leave()
  void leave();    // called on this fiber: resume() returns
  void entered();  // the first thing that `entry` calls

 private:
  ucontext_t own_;
  ucontext_t caller_;
  void* stack_;
  void* own_fake_stack_ = nullptr;
  void* caller_fake_stack_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_bytes_ = 0;
  void* own_tsan_ = nullptr;
  void* caller_tsan_ = nullptr;
};

// For ThreadSanitizer: what was written before release(token) may be read after acquire(token).
// Nothing else orders the fibers for it, so that it sees them as threads.
void release(void* token);
void acquire(void* token);

}  // namespace emulation
