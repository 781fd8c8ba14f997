// Where a row of numbers is largest.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t kLargestLanes = 16;    // maxima side by side: the compiler keeps them in vectors
constexpr int64_t kLargestBlock = 2048;  // numbers that are searched for the one that was largest

inline float largest_in(const float* x, int64_t count) {
  float lanes[kLargestLanes];
  std::fill(lanes, lanes + kLargestLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLargestLanes <= count; i += kLargestLanes)
    for (int64_t lane = 0; lane < kLargestLanes; ++lane)
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  for (; i < count; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  return *std::max_element(lanes, lanes + kLargestLanes);
}

// The first of the largest of `count` numbers; 0 if none is above minus infinity.
inline int64_t first_largest(const float* x, int64_t count) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t block = 0;
  for (int64_t at = 0; at < count; at += kLargestBlock) {
    const float here = largest_in(x + at, std::min(kLargestBlock, count - at));
    if (here > most) most = here, block = at;
  }
  const float* const end = x + std::min(count, block + kLargestBlock);
  const float* const found = std::find(x + block, end, most);
  return found == end ? 0 : found - x;
}

}  // namespace
