#include "compaction.h"

namespace kvell::memory {
namespace {

// The names and values of prefix/compaction.py.
constexpr int64_t kSpread = 64, kSpareLarge = 16, kScanPages = 4096;

}  // namespace

std::vector<Move> Compactor::compact(const std::map<int32_t, Holder*>& holders,
                                     int64_t most_large) {
  std::vector<Move> moves;
  if (holders.empty() || !is_worth_it()) return moves;
  scanned_ = 0;
  auto at = holders.upper_bound(last_);
  for (size_t left = holders.size(); left; --left, ++at) {
    if (scanned_ >= kScanPages || most_large <= 0) break;
    if (at == holders.end()) at = holders.begin();
    last_ = at->first;
    visit(*at->second, most_large, moves);
  }
  return moves;
}

bool Compactor::is_worth_it() const {
  const Pool& pool = store_.pool;
  if (store_.placer.is_literal() || pool.supply().has_shares()) return false;
  int64_t partial_bytes = 0;
  for (size_t g = 0; g < store_.groups.size(); ++g)
    partial_bytes += pool.supply().partial()[g] * store_.groups[g].page_bytes;
  return partial_bytes * kSpread >= store_.large_page_bytes * pool.num_large() && is_spare();
}

bool Compactor::is_spare() const {
  const int64_t whole = store_.pool.supply().whole();
  return whole > 0 && whole * kSpareLarge >= store_.pool.num_large();
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
  for (int64_t position = from; position < end; ++position) {
    const int32_t slot = held.slots[size_t(position - held.first)];
    if (pool.large_of(slot) != large) {
      large = pool.large_of(slot);
      is_sparse = pool.is_sparse(large);
    }
    if (!is_sparse || pool.page(slot).users() != 1) continue;
    positions_.push_back(position);
    if (int64_t(positions_.size()) == most) return;
  }
}

void Compactor::move(Holder& h, int32_t g, std::vector<Move>& moves) {
  const int32_t large = store_.placer.vacate(g, h.handle);
  GroupPages& held = h.groups[g];
  std::vector<int32_t> slots;
  store_.pool.take(large, int64_t(positions_.size()), slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    int32_t& slot = held.slots[size_t(positions_[i] - held.first)];
    store_.tree.rename(g, slot, slots[i]);
    moves.push_back({&h, g, positions_[i], slot, slots[i]});
    h.sources.push_back({g, slot, positions_[i], 0});
    slot = slots[i];
  }
  h.next_event = 0;
}

}  // namespace kvell::memory
