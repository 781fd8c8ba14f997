// From counts to what a cached chunk is worth: tests/oracle/eviction/hazard_fit.py, which says what and why, in
// the time of one of its calls.
#pragma once
#include <cstdint>
#include <vector>

namespace kvell::memory {

// What a chunk of each class is worth at each age, [kClasses][kAges]: hazards, then index_of.
// `entered` and `returned` [kClasses][kAges], `events` [kClasses], `bounds` [kAges + 1].
std::vector<double> fitted(const double* entered, const double* returned, const double* events,
                           const int64_t* bounds);

}  // namespace kvell::memory
