// Who returns, counted: classes of what requests leave behind, and what each is worth by age
// (tests/oracle/eviction/hazard.py, which says what and why). Counts are turned into worth by whoever is
// asked to (tests/oracle/eviction/hazard_fit.py); every sum here is taken in the order of the Python one, so
// that both hold the same numbers to the bit.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "key_table.h"

namespace kvell::memory {

constexpr int32_t kKinds = 6, kHints = 3, kOutputs = 6, kAges = 36;  // tests/oracle/eviction/hazard_fit.py
constexpr int32_t kClasses = kKinds * kHints * kOutputs;
constexpr int32_t class_at(int32_t kind, int32_t hint, int32_t output) {
  return (kind * kHints + hint) * kOutputs + output;
}

enum class Hint : int32_t { kNone, kReturns, kEnds };  // a client's word on its conversation

struct Run {  // prefixes of one class, up to `end` tokens
  int64_t end;
  int32_t eviction_class;
};

// What is known of a request when it ends (Ending in tests/oracle/eviction/evictor.py).
struct Ending {
  const std::string& root;
  const std::vector<uint64_t>& named;  // the chunks that its prompt fills: HazardTable::names
  const int32_t* prompt;
  int64_t prompt_tokens;
  const std::vector<int32_t>& generated;
  int64_t tokens;  // of both, that are computed
  Hint hint;
};

// The numbers of tests/oracle/eviction/hazard.py.
struct HazardSettings {
  int64_t most_keys = 0;  // that are remembered; 0: nothing is learned
  int64_t chunk_tokens = 0;
  int64_t first_refit = 0;  // requests until the first
  std::vector<int64_t> bounds;  // of ages, kAges + 1
};

class HazardTable {
 public:
  explicit HazardTable(HazardSettings settings);

  // What a chunk of this class and age is worth; the least goes first.
  double value(int32_t eviction_class, int64_t age) const;
  // The same of a cached page: what a running request left behind stays as its other pages do.
  double worth(int32_t eviction_class, int64_t age) const;
  // Of what a request leaves behind of which no end is known.
  static int32_t class_before(int64_t expected_output, Hint hint, bool is_running);
  // The keys of the chunks that a prompt fills, each of all tokens up to its end: when it has just
  // been copied, for it will be out of the caches when its request ends.
  std::vector<uint64_t> names(const std::string& root, const int32_t* prompt, int64_t tokens) const;
  // A request ends now: classes of its prefixes.
  void access(const Ending& ending, int64_t now, std::vector<Run>& runs);

  // ---- learning
  bool is_due() const { return requests_ >= next_refit_; }
  int64_t requests() const { return requests_; }
  const std::vector<double>& entered() const { return entered_; }    // [kClasses][kAges]
  const std::vector<double>& returned() const { return returned_; }  // [kClasses][kAges]
  const std::vector<double>& events() const { return events_; }      // [kClasses]
  // What was learned from these; older counts fade.
  void learn(std::vector<double> index, double fading, int64_t next_refit);

 private:
  // A run, as long as some of its chunks are neither accessed anew nor forgotten.
  struct Past {
    int64_t time;
    double weight;
    int32_t eviction_class;
    int32_t left;
    bool ages;  // it has not reached the last age
  };
  // A chunk that is remembered, between one accessed before it and one after.
  struct Known {
    uint64_t key;
    int32_t uses;
    uint32_t past, older, newer;
  };

  void name(const Ending& ending);
  void find();
  uint32_t remember(uint64_t key);
  void leave_past_runs(int64_t now);
  void enter(const std::vector<Run>& runs, int64_t now);
  void age(int64_t now);
  void begin_aging(int32_t bucket, uint32_t at);
  void promote(std::vector<Run>& runs) const;
  void forget_oldest();
  void unlink(uint32_t at);
  void push_newest(uint32_t at);
  uint32_t new_past(const Past& past);
  void let_go(uint32_t past);
  int32_t bucket_of(int64_t age) const;
  static int32_t width_of(int64_t age) {  // in bits
    return age ? 64 - __builtin_clzll(uint64_t(age)) : 0;
  }

  const HazardSettings settings_;
  std::array<int32_t, 65> first_buckets_{};  // of the ages of so many bits
  KeyTable where_;
  std::vector<Known> known_;  // [0] is before the oldest and after the newest
  std::vector<uint32_t> free_known_;
  std::vector<Past> pasts_;  // [0] stands for none
  std::vector<uint32_t> free_pasts_;
  std::vector<std::deque<uint32_t>> aging_;  // by the age that they have reached
  std::array<int64_t, kAges> due_;           // when the first of each reaches its next
  std::vector<double> entered_, returned_, events_, index_;
  int64_t requests_ = 0, next_refit_;
  // Scratch: the chunks of a request, their keys, and how often each was used.
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> chain_;
  std::vector<int32_t> uses_;
  int64_t found_ = 0;  // leading chunks that were known
};

}  // namespace kvell::memory
