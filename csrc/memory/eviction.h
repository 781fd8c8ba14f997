// What an access makes of a page's place in the eviction order (tests/oracle/eviction/evictor.py): the least
// recently used goes first, or, of what counts like any page, what is worth least by what was
// learned (tests/oracle/eviction/hazard_rule.py). Pool, queues and placer compare keys within a class, and
// places between classes.
#pragma once
#include <limits>
#include <memory>

#include "hazard.h"
#include "records.h"

namespace kvell::memory {

constexpr int64_t kWorthSteps = 8;  // WORTH_STEPS in tests/oracle/eviction/hazard_rule.py
constexpr int64_t kSpare = 0, kCoarse = 1, kNormal = 2;

// Eviction order of a cached page now; the smallest goes first.
struct Place {
  int64_t rank;
  double worth;
  int64_t time;
  uint32_t shortness;

  bool operator<(const Place& other) const {
    if (rank != other.rank) return rank < other.rank;
    if (worth != other.worth) return worth < other.worth;
    return time != other.time ? time < other.time : shortness < other.shortness;
  }
  // As soon as the other, whatever their lengths.
  bool is_no_younger(const Place& other) const {
    if (rank != other.rank) return rank < other.rank;
    return worth != other.worth ? worth < other.worth : time <= other.time;
  }
};

class EvictionRule {
 public:
  // Settings without keys to remember: the least recently used.
  explicit EvictionRule(const HazardSettings& settings) {
    if (settings.most_keys) table_ = std::make_unique<HazardTable>(settings);
  }

  bool learns() const { return bool(table_); }
  HazardTable& table() const { return *table_; }
  int32_t num_classes() const { return learns() ? kClasses : 1; }
  // Worth changed: by time, or because of what was learned.
  void set_time(int64_t step) {
    step_ = step;
    const int64_t seen = step - step % kWorthSteps;
    if (seen != seen_) ++epoch_;
    seen_ = seen;
  }
  void learned() { ++epoch_; }
  int64_t epoch() const { return epoch_; }

  Key key(int64_t rank, int64_t time, int64_t prefix_length, int32_t eviction_class = 0) const {
    const int32_t number = rank == kNormal ? eviction_class : 0;  // the others go by age
    return make_key(make_stamp(rank, time, number), prefix_length);
  }
  int64_t age(const Key& key) const { return step_ - time_of(key); }
  double worth(const Key& key) const {
    if (!learns() || rank_of(key) != kNormal) return 0.0;
    return table_->worth(class_of(key), std::max<int64_t>(0, seen_ - time_of(key)));
  }
  Place place(const Key& key) const {
    return {rank_of(key), worth(key), time_of(key), key.shortness};
  }
  // The time of a renewal at the end of a request that was expected to end then. By its age
  // alone what was to be young until then stays so; else its class is another now, too.
  int64_t ended_at(int64_t now, int64_t expected) const {
    return learns() ? std::max(now, expected) : now;
  }
  // Places below this one may give way to what is kept now with this rank.
  Place limit(int64_t rank) const {
    if (learns()) return {rank, std::numeric_limits<double>::infinity(), 0, 0};
    return {rank, 0.0, step_, 0};
  }

 private:
  std::unique_ptr<HazardTable> table_;
  int64_t step_ = 0, seen_ = 0, epoch_ = 0;
};

}  // namespace kvell::memory
