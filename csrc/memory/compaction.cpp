#include "compaction.h"

namespace kvell::memory {
namespace {

// The names and values of tests/oracle/placement/compaction.py.
constexpr int64_t kSpread = 64, kSpareLarge = 16, kScanPages = 4096;
constexpr int64_t kSqueezedPages = 64, kMostRest = 31;

constexpr int64_t kTogether = 8;

// Are so many slots of one large page?
bool lie_together(const Pool& pool, const int32_t* slots) {
  int32_t differences = 0;
  for (int64_t i = 1; i < kTogether; ++i) differences |= slots[i] ^ slots[0];
  return pool.large_of(differences) == 0;
}

}  // namespace

std::vector<Move> Compactor::compact(const std::map<int32_t, Holder*>& holders,
                                     int64_t most_large) {
  std::vector<Move> moves;
  if (holders.empty() || !is_worth_it()) return moves;
  const bool gathers = is_spare();
  if (!gathers && rests_ > 0) {
    --rests_;
    return moves;
  }
  scanned_ = 0;
  auto at = holders.upper_bound(last_);
  for (size_t left = holders.size(); left; --left, ++at) {
    if (scanned_ >= kScanPages || most_large <= 0) break;
    if (!gathers && int64_t(moves.size()) >= kSqueezedPages) break;
    if (at == holders.end()) at = holders.begin();
    last_ = at->first;
    if (gathers)
      visit(*at->second, most_large, moves);
    else
      squeeze(*at->second, moves);
  }
  if (!gathers) {
    rest_ = moves.empty() ? std::min(2 * rest_ + 1, kMostRest) : 0;
    rests_ = rest_;
  }
  return moves;
}

bool Compactor::is_worth_it() const {
  const Pool& pool = store_.pool;
  if (store_.placer.is_literal() || pool.supply().has_shares()) return false;
  if (pool.supply().whole() == 0) return true;
  int64_t partial_bytes = 0;
  for (size_t g = 0; g < store_.groups.size(); ++g)
    partial_bytes += pool.supply().partial()[g] * store_.groups[g].page_bytes;
  return partial_bytes * kSpread >= store_.large_page_bytes * pool.num_large();
}

bool Compactor::is_spare() const {
  const int64_t whole = store_.pool.supply().whole();
  return whole > 0 && whole * kSpareLarge >= store_.pool.num_large();
}

// Moves pages from sparse large pages into denser ones.
void Compactor::squeeze(Holder& h, std::vector<Move>& moves) {
  if (h.lease_until || !h.sources.empty()) return;
  Pool& pool = store_.pool;
  for (const int32_t g : h.model->own) {
    GroupPages& held = h.groups[g];
    scanned_ += int64_t(held.slots.size());
    const int64_t per_large = pool.per_large(g), most = kSqueezedPages - int64_t(moves.size());
    if (most <= 0 || per_large == 1 || pool.supply().partial()[g] < per_large) continue;
    positions_.clear();
    const int64_t end = held.first + std::min<int64_t>(held.slots.size(), kScanPages);
    scan(held, held.first, end, most);
    for (const int64_t position : positions_) {
      const int32_t slot = held.slots[size_t(position - held.first)];
      const int32_t large = store_.placer.denser(g, pool.large_of(slot));
      if (large < 0) break;
      taken_.clear();
      pool.take(large, 1, taken_);
      rename(h, g, position, taken_[0], moves);
    }
  }
}

void Compactor::visit(Holder& h, int64_t& most_large, std::vector<Move>& moves) {
  if (h.lease_until || !h.sources.empty()) return;
  for (const int32_t g : h.model->own) {
    scanned_ += int64_t(h.groups[g].slots.size());
    if (most_large <= 0 || !is_spare()) continue;
    find_scattered(g, h.groups[g]);
    if (positions_.empty()) continue;
    --most_large;
    move(h, g, moves);
  }
}

// Positions whose pages fill a large page, and lie in sparse ones; none if too few.
void Compactor::find_scattered(int32_t g, GroupPages& held) {
  const int64_t per_large = store_.pool.per_large(g);
  const int64_t end = held.first + std::min<int64_t>(held.slots.size(), kScanPages);
  positions_.clear();
  if (per_large == 1) return;
  // Most often nothing became sparse since it was looked through, and only new pages count.
  if (held.thinned == store_.pool.thinned(g)) {
    scan(held, std::max(held.first, held.scanned_to), end, per_large);
    if (held.scattered + int64_t(positions_.size()) < per_large) return note_scanned(g, held, end);
  }
  positions_.clear();
  held.scattered = 0;
  held.thinned = -1;
  scan(held, held.first, end, per_large);
  if (int64_t(positions_.size()) < per_large) note_scanned(g, held, end);
}

// Too few were found.
void Compactor::note_scanned(int32_t g, GroupPages& held, int64_t end) {
  held.thinned = store_.pool.thinned(g);
  held.scanned_to = end;
  held.scattered += int64_t(positions_.size());
  positions_.clear();
}

// Adds positions from one to another of pages that lie in sparse large pages, until there are
// so many.
void Compactor::scan(const GroupPages& held, int64_t from, int64_t end, int64_t most) {
  Pool& pool = store_.pool;
  int32_t large = -1;  // that the page before lies in: most often this one does too
  bool is_sparse = false;
  const int32_t* slots = held.slots.begin();
  const int64_t stop = end - held.first;
  for (int64_t at = from - held.first; at < stop; ++at) {
    if (pool.large_of(slots[at]) != large) {
      large = pool.large_of(slots[at]);
      is_sparse = pool.is_sparse(large);
    }
    // Nothing is found in most of them.
    while (!is_sparse && at + kTogether <= stop && lie_together(pool, slots + at))
      at += kTogether - 1;
    if (!is_sparse || pool.page(slots[at]).users() != 1) continue;
    positions_.push_back(held.first + at);
    if (int64_t(positions_.size()) == most) return;
  }
}

void Compactor::move(Holder& h, int32_t g, std::vector<Move>& moves) {
  const int32_t large = store_.placer.vacate(g, h.handle);
  taken_.clear();
  store_.pool.take(large, int64_t(positions_.size()), taken_);
  for (size_t i = 0; i < taken_.size(); ++i) rename(h, g, positions_[i], taken_[i], moves);
}

void Compactor::rename(Holder& h, int32_t g, int64_t position, int32_t to,
                       std::vector<Move>& moves) {
  GroupPages& held = h.groups[g];
  int32_t& slot = held.slots[size_t(position - held.first)];
  const PageRecord& page = store_.pool.page(slot);
  if (page.node) store_.changes.moved(g, slot, to, page.end);
  store_.tree.rename(g, slot, to);
  moves.push_back({&h, g, position, slot, to});
  h.sources.push_back({g, slot, position, 0});
  slot = to;
  h.next_event = 0;
}

}  // namespace kvell::memory
