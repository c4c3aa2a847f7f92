#include <cstdio>
#include <exception>

#include "drive.h"

int main() {
  try {
    drive::run_all();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
