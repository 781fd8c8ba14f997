#include "loans.h"

#include "attention/arguments.h"

namespace kvell {

bool Loans::stands(uint64_t right) const {
  // Others write the word, in Python or in another process: it is read anew each time.
  return __atomic_load_n(words_ + right % count_, __ATOMIC_ACQUIRE) == right;
}

void Loans::lend(uint64_t right, int debtor, std::vector<std::vector<int32_t>> pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (right == 0 || !lent_.emplace(right, Lent{debtor, std::move(pages)}).second)
    refuse("right: zero, or lent already");
}

bool Loans::end(uint64_t right, std::chrono::nanoseconds patience) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = lent_.find(right);
  if (found == lent_.end()) return true;
  found->second.over = true;
  if (found->second.readers == 0) {
    lent_.erase(found);
    return true;
  }
  return read_.wait_for(lock, patience, [&] { return lent_.find(right) == lent_.end(); });
}

bool Loans::begin(const uint64_t* rights, int64_t count, int debtor, int group, std::vector<int32_t>& pages) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = lent_.find(rights[i]);
    if (found == lent_.end() || found->second.over || found->second.debtor != debtor) return false;
    if (found->second.pages[group].empty() || !stands(rights[i])) return false;
  }
  for (int64_t i = 0; i < count; ++i) {
    Lent& lent = lent_.find(rights[i])->second;
    ++lent.readers;
    pages.insert(pages.end(), lent.pages[group].begin(), lent.pages[group].end());
  }
  reading_ += count;
  return true;
}

bool Loans::finish(const uint64_t* rights, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bool stood = true;
  // What was read must not be asked for after the words: loads of pages come before this one.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = lent_.find(rights[i]);
    stood = stood && !found->second.over && stands(rights[i]);
    if (--found->second.readers == 0 && found->second.over) lent_.erase(found);
  }
  reading_ -= count;
  read_.notify_all();
  return stood;
}

}  // namespace kvell
