// Where a row of numbers is largest.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t kNotNumbers = -2;      // NOT_NUMBERS in kvell/vocabulary.py
constexpr int64_t kLargestLanes = 16;    // maxima side by side: the compiler keeps them in vectors
constexpr int64_t kLargestBlock = 2048;  // numbers that are searched for the one that was largest

struct Largest {
  float value;
  bool has_nan;
};

// A sum is finite only if no number in it is NaN. If it is not, the numbers may just be too large for it.
inline Largest largest_in(const float* x, int64_t count) {
  float lanes[kLargestLanes], sums[kLargestLanes] = {};
  std::fill(lanes, lanes + kLargestLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLargestLanes <= count; i += kLargestLanes)
    for (int64_t lane = 0; lane < kLargestLanes; ++lane) {
      lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
      sums[lane] += x[i + lane];
    }
  for (; i < count; ++i) {
    lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    sums[0] += x[i];
  }
  const bool is_plain =
      std::all_of(sums, sums + kLargestLanes, [](float sum) { return std::isfinite(sum); });
  const bool has_nan =
      !is_plain && std::any_of(x, x + count, [](float one) { return std::isnan(one); });
  return {*std::max_element(lanes, lanes + kLargestLanes), has_nan};
}

// The first of the largest of `count` numbers; kNotNumbers if one of them is NaN, or the largest is
// infinite.
inline int64_t first_largest(const float* x, int64_t count) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  float most = -kInfinity;
  int64_t block = 0;
  for (int64_t at = 0; at < count; at += kLargestBlock) {
    const Largest here = largest_in(x + at, std::min(kLargestBlock, count - at));
    if (here.has_nan) return kNotNumbers;
    if (here.value > most) most = here.value, block = at;
  }
  if (most == kInfinity || most == -kInfinity) return kNotNumbers;
  const float* const end = x + std::min(count, block + kLargestBlock);
  return std::find(x + block, end, most) - x;
}

}  // namespace
