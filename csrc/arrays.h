// What Python hands over of a shard in mixed precision.
#pragma once

#include <array>

#include "address.h"
#include "kernels.h"

namespace fusedshard {

// exp_avg, exp_avg_sq and max_exp_avg_sq: addresses of values and of exponents, 0 where there is
// none.
using MomentAddresses = std::array<std::array<int64_t, 2>, 3>;

// Of the parameter, the master and the moments as numbers of Format, and whether to round at
// random.
using Formats = std::array<int32_t, 4>;

inline MixedArrays mixed_arrays(int64_t param, int64_t master, int64_t checks,
                                const MomentAddresses& moments, const Formats& formats,
                                int64_t seed) {
  const auto moment = [&](size_t i) {
    return Moment{at<void>(moments[i][0]), at<uint8_t>(moments[i][1])};
  };
  return {at<void>(param),
          at<void>(master),
          at<uint32_t>(checks),
          moment(0),
          moment(1),
          moment(2),
          static_cast<Format>(formats[0]),
          static_cast<Format>(formats[1]),
          static_cast<Format>(formats[2]),
          formats[3],
          seed};
}

}  // namespace fusedshard
