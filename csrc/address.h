// Addresses as Python hands them over.
#pragma once

#include <cstdint>

namespace fusedshard {

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

}  // namespace fusedshard
