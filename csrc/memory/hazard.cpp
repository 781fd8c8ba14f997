#include "hazard.h"

#include "rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvell::memory {
namespace {

constexpr int32_t kMostUses = 4, kLeastOutputLog2 = 4;
constexpr int32_t kRunning = 0, kOnce = 1;  // kinds: no chunk here is partial
constexpr int64_t kRunningSteps = 64;  // RUNNING_STEPS in tests/oracle/eviction/hazard_rule.py

int32_t log2_of(uint64_t value) { return 63 - __builtin_clzll(value); }

int32_t class_of(int32_t kind, Hint hint, int64_t output_tokens) {
  const int32_t length = log2_of(uint64_t(output_tokens) + 1) - kLeastOutputLog2;
  const int32_t output = std::min(std::max(length, 0), kOutputs - 1);
  return class_at(kind, int32_t(hint), output);
}

// Multiplied to 128 bits, both halves count.
uint64_t mixed(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

constexpr uint64_t kOdd[] = {0xa0761d6478bd642f, 0xe7037ed1a0b428db, 0x8ebc6af09c88c6e3,
                             0x589965cc75374cc3};

uint64_t word_at(const char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

constexpr int64_t kMostReserved = 1 << 16;  // keys whose room is there from the start

// Names bytes together with all before them (`seed`). What is at stake is statistics alone.
uint64_t hash_of(const char* bytes, size_t count, uint64_t seed) {
  constexpr size_t kLanes = 4, kStride = 2 * sizeof(uint64_t);  // each waits for itself alone
  uint64_t lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = seed ^ kOdd[i];
  const auto fold = [&lanes](const char* from) {
    for (size_t i = 0; i < kLanes; ++i, from += kStride)
      lanes[i] = mixed(word_at(from) ^ kOdd[i], word_at(from + sizeof(uint64_t)) ^ lanes[i]);
  };
  size_t at = 0;
  for (; at + kLanes * kStride <= count; at += kLanes * kStride) fold(bytes + at);
  char tail[kLanes * kStride] = {};
  if (at < count) std::memcpy(tail, bytes + at, count - at);
  fold(tail);
  const uint64_t left = mixed(lanes[0] ^ kOdd[2], lanes[1] ^ kOdd[3]);
  const uint64_t right = mixed(lanes[2] ^ kOdd[0], lanes[3] ^ kOdd[1]);
  return mixed(left ^ kOdd[3], right ^ count);
}

uint64_t hash_of(const std::string& root) { return hash_of(root.data(), root.size(), 0); }

uint64_t hash_of(const int32_t* tokens, int64_t count, uint64_t seed) {
  return hash_of(reinterpret_cast<const char*>(tokens), size_t(count) * sizeof *tokens, seed);
}

}  // namespace

HazardTable::HazardTable(HazardSettings settings)
    : settings_(std::move(settings)),
      where_(size_t(std::min(settings_.most_keys, kMostReserved))),
      pasts_(1),
      aging_(kAges),
      entered_(kClasses * kAges),
      returned_(kClasses * kAges),
      events_(kClasses),
      next_refit_(settings_.first_refit) {
  // Memory behind what is going to be remembered now, not page by page while requests end.
  known_.resize(size_t(std::min(settings_.most_keys, kMostReserved)) + 1);
  known_.resize(1);
  due_.fill(kNever);
  for (int32_t bits = 1, bucket = 0; bits < int32_t(first_buckets_.size()); ++bits) {
    while (bucket < kAges && uint64_t(settings_.bounds[bucket + 1]) <= uint64_t(1) << (bits - 1))
      ++bucket;
    first_buckets_[bits] = bucket;
  }
}

// Buckets are about √2 apart: two of each width in bits.
int32_t HazardTable::bucket_of(int64_t age) const {
  int32_t bucket = first_buckets_[width_of(age)];
  while (bucket < kAges && settings_.bounds[bucket + 1] <= age) ++bucket;
  return bucket;
}

double HazardTable::value(int32_t eviction_class, int64_t age) const {
  if (index_.empty()) return 0.0;
  const double* row = &index_[size_t(eviction_class) * kAges];
  int32_t bucket = std::min(bucket_of(age), kAges - 1);
  const int64_t from = settings_.bounds[bucket], to = settings_.bounds[bucket + 1];
  double part = double(age - from) / double(to - from) - 0.5;
  if (part < 0 && bucket) {
    --bucket;
    part += 1;
  }
  const double after = row[std::min(bucket + 1, kAges - 1)];
  part = std::min(std::max(part, 0.0), 1.0);
  return std::max(after, row[bucket] + part * (after - row[bucket]));  // rounding: no less
}

int32_t HazardTable::class_before(int64_t expected_output, Hint hint, bool is_running) {
  return class_of(is_running ? kRunning : kOnce, hint, expected_output);
}

double HazardTable::worth(int32_t eviction_class, int64_t age) const {
  if (eviction_class >= kOnce * kHints * kOutputs) return value(eviction_class, age);
  if (age <= kRunningSteps) return std::numeric_limits<double>::infinity();
  return value(eviction_class + kOnce * kHints * kOutputs, age);
}

void HazardTable::access(const Ending& ending, int64_t now, std::vector<Run>& runs) {
  age(now);
  runs.clear();
  if (ending.tokens < settings_.chunk_tokens) return;
  name(ending);
  find();
  leave_past_runs(now);
  const int64_t output = int64_t(ending.generated.size());
  for (size_t i = 0; i < uses_.size(); ++i) {
    if (i && uses_[i] == uses_[i - 1]) {
      ++runs.back().end;
      continue;
    }
    const int32_t kind = uses_[i] + (uses_[i] > 1 || found_ > 1);
    runs.push_back({int64_t(i) + 1, class_of(kind, ending.hint, output)});
  }
  enter(runs, now);
  ++requests_;
  promote(runs);
  for (Run& run : runs) run.end *= settings_.chunk_tokens;
}

std::vector<uint64_t> HazardTable::names(const std::string& root, const int32_t* prompt,
                                         int64_t tokens) const {
  const int64_t size = settings_.chunk_tokens;
  std::vector<uint64_t> keys;
  keys.reserve(size_t(tokens / size));
  uint64_t key = hash_of(root);
  for (int64_t start = 0; start + size <= tokens; start += size)
    keys.push_back(key = hash_of(prompt + start, size, key));
  return keys;
}

// The keys of a request's chunks: those of its prompt, then where its answer begins and goes on.
void HazardTable::name(const Ending& ending) {
  const int64_t size = settings_.chunk_tokens, count = ending.tokens / size;
  const int64_t named = std::min(int64_t(ending.named.size()), count);
  keys_.assign(ending.named.begin(), ending.named.begin() + named);
  uint64_t key = named ? keys_.back() : hash_of(ending.root);
  std::vector<int32_t> seam;
  for (int64_t start = named * size; start < count * size; start += size) {
    const int64_t generated = start - ending.prompt_tokens;  // of the answer, before the chunk
    const int32_t* text = nullptr;
    if (generated >= 0) {
      text = ending.generated.data() + generated;
    } else {
      seam.assign(ending.prompt + start, ending.prompt + ending.prompt_tokens);
      seam.insert(seam.end(), ending.generated.begin(), ending.generated.begin() + (generated + size));
      text = seam.data();
    }
    keys_.push_back(key = hash_of(text, size, key));
  }
  for (const uint64_t each : keys_) where_.fetch(each);
}

// The chunks of a request, new ones too, and how many at its beginning were known.
void HazardTable::find() {
  chain_.clear();
  for (const uint64_t key : keys_) {
    chain_.push_back(remember(key));
    __builtin_prefetch(&known_[chain_.back()], 1);
  }
  found_ = 0;
  while (found_ < int64_t(chain_.size()) && known_[chain_[size_t(found_)]].uses) ++found_;
}

uint32_t HazardTable::remember(uint64_t key) {
  uint32_t& place = where_[key];
  if (place) return place;
  uint32_t at = uint32_t(known_.size());
  if (free_known_.empty()) {
    known_.emplace_back();
  } else {
    at = free_known_.back();
    free_known_.pop_back();
  }
  known_[at] = {key, 0, 0, at, at};
  return place = at;
}

// Counts returns; how often each chunk was used, this time too.
void HazardTable::leave_past_runs(int64_t now) {
  uses_.clear();
  uint32_t last = 0;
  for (const uint32_t at : chain_) {
    Known& chunk = known_[at];
    uses_.push_back(std::min(chunk.uses + 1, kMostUses));
    if (!chunk.past) continue;
    Past& past = pasts_[chunk.past];
    const int32_t bucket = bucket_of(now - past.time);
    if (bucket < kAges) returned_[size_t(past.eviction_class) * kAges + bucket] += past.weight;
    if (chunk.past != last) events_[past.eviction_class] += 1;
    last = chunk.past;
  }
  for (const uint32_t at : chain_)
    if (known_[at].past) let_go(known_[at].past);
}

void HazardTable::enter(const std::vector<Run>& runs, int64_t now) {
  int64_t start = 0;
  for (const Run& run : runs) {
    const int64_t size = run.end - start;
    const double weight = 1 / std::sqrt(double(size));
    const uint32_t past = new_past({now, weight, run.eviction_class, int32_t(size), true});
    begin_aging(0, past);
    entered_[size_t(run.eviction_class) * kAges] += weight * double(size);
    for (int64_t i = start; i < run.end; ++i) known_[chain_[i]].past = past;
    start = run.end;
  }
  for (size_t i = chain_.size(); i-- > 0;) {  // a prompt's end is forgotten before its beginning
    known_[chain_[i]].uses = uses_[i];
    unlink(chain_[i]);
    push_newest(chain_[i]);
  }
  while (int64_t(where_.size()) > settings_.most_keys) forget_oldest();
}

// Runs that reached their next bucket are counted there.
void HazardTable::age(int64_t now) {
  for (int32_t bucket = 0; bucket < kAges; ++bucket) {
    while (now >= due_[bucket]) {
      std::deque<uint32_t>& aging = aging_[bucket];
      const uint32_t at = aging.front();
      aging.pop_front();
      due_[bucket] = aging.empty() ? kNever : pasts_[aging.front()].time + settings_.bounds[bucket + 1];
      Past& past = pasts_[at];
      if (past.left && bucket + 1 < kAges) {
        entered_[size_t(past.eviction_class) * kAges + bucket + 1] += past.weight * past.left;
        begin_aging(bucket + 1, at);
        continue;
      }
      past.ages = false;
      if (!past.left) free_pasts_.push_back(at);
    }
  }
}

void HazardTable::begin_aging(int32_t bucket, uint32_t at) {
  if (aging_[bucket].empty()) due_[bucket] = pasts_[at].time + settings_.bounds[bucket + 1];
  aging_[bucket].push_back(at);
}

// A prefix is worth at least what goes on from it; neighbours of one class are one.
void HazardTable::promote(std::vector<Run>& runs) const {
  size_t first = runs.size() - 1;
  for (size_t i = runs.size() - 1; i-- > 0;) {
    int32_t best = runs[first].eviction_class;
    if (value(runs[i].eviction_class, 0) >= value(best, 0)) best = runs[i].eviction_class;
    if (best != runs[first].eviction_class) runs[--first] = {runs[i].end, best};
  }
  runs.erase(runs.begin(), runs.begin() + int64_t(first));
}

void HazardTable::learn(std::vector<double> index, double fading, int64_t next_refit) {
  index_ = std::move(index);
  for (std::vector<double>* counts : {&entered_, &returned_, &events_})
    for (double& count : *counts) count *= fading;
  next_refit_ = next_refit;
}

// ------------------------------------------------------------------ what is remembered

void HazardTable::forget_oldest() {
  const uint32_t at = known_[0].newer;
  let_go(known_[at].past);
  unlink(at);
  where_.fetch(known_[known_[0].newer].key);  // likely to be the next
  where_.erase(known_[at].key);
  free_known_.push_back(at);
}

void HazardTable::unlink(uint32_t at) {
  const Known& chunk = known_[at];
  if (chunk.older == at) return;  // in no list yet
  known_[chunk.older].newer = chunk.newer;
  known_[chunk.newer].older = chunk.older;
}

void HazardTable::push_newest(uint32_t at) {
  const uint32_t before = known_[0].older;
  known_[at].older = before;
  known_[at].newer = 0;
  known_[before].newer = at;
  known_[0].older = at;
}

uint32_t HazardTable::new_past(const Past& past) {
  if (free_pasts_.empty()) {
    pasts_.push_back(past);
    return uint32_t(pasts_.size()) - 1;
  }
  const uint32_t at = free_pasts_.back();
  free_pasts_.pop_back();
  pasts_[at] = past;
  return at;
}

void HazardTable::let_go(uint32_t at) {
  Past& past = pasts_[at];
  if (!--past.left && !past.ages) free_pasts_.push_back(at);
}

}  // namespace kvell::memory
