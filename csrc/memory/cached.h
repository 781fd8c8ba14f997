// Cached pages of one group, in the order in which they go (Evictor in tests/oracle/eviction/evictor.py).
#pragma once
#include "classes.h"

namespace kvell::memory {

class CachedPages {
 public:
  // `alone`: pages of the group are large pages. Those that are cached are then in no queue:
  // whoever may have a page of the group may have a large page, and finds it among these.
  CachedPages(ZeroArray<PageRecord>& pages, const EvictionRule& rule, bool alone)
      : pages_(pages), rule_(rule), is_alone_(alone), queue_(pages, rule), aside_(pages, rule) {}

  bool is_alone() const { return is_alone_; }

  void push(int32_t slot) {
    if (is_alone_)
      pages_[slot].run = kAlone;
    else
      queue_.push(slot);
  }
  void remove(int32_t slot) {
    PageRecord& page = pages_[slot];
    if (page.run == kAlone)
      page.run = 0;
    else if (page.run & kAside)
      aside_.remove(slot);
    else
      queue_.remove(slot);
  }
  // Of a cached page.
  void renew(int32_t slot, const Key& key) {
    PageRecord& page = pages_[slot];
    const bool is_aside = page.run & kAside;
    remove(slot);
    page.key = key;
    if (is_aside)
      aside_.push(slot);
    else
      push(slot);
  }

  // The page that goes first; null if there is none.
  const Entry* oldest() const {
    if (aside_.empty()) return queue_.empty() ? nullptr : &queue_.top();
    if (queue_.empty()) return &aside_.top();
    const Entry *one = &queue_.top(), *other = &aside_.top();
    if (!rule_.learns()) return *other < *one ? other : one;
    const Place first = queue_.place(), second = aside_.place();
    if (first < second) return one;
    return second < first || other->id() < one->id() ? other : one;
  }
  // The same of those beside used ones: is_beside(slot). It may be asked of `next` soon.
  template <class IsBeside, class Fetch>
  const Entry* oldest_beside(const IsBeside& is_beside, const Fetch& fetch) {
    while (!queue_.empty() && !is_beside(queue_.top().id())) {
      const int32_t slot = queue_.top().id();
      fetch(queue_.next());
      queue_.remove(slot);
      aside_.push(slot);
    }
    return queue_.empty() ? nullptr : &queue_.top();
  }
  bool has_aside() const { return !aside_.empty(); }
  // Its large page is used again.
  void bring_back(int32_t slot) {
    if (!(pages_[slot].run & kAside)) return;
    aside_.remove(slot);
    queue_.push(slot);
  }

  // See RunQueue.
  template <class NewId>
  void rename(const NewId& new_id) {
    queue_.rename(new_id);
    aside_.rename(new_id);
  }

 private:
  static constexpr uint32_t kAside = uint32_t(1) << 31;
  static constexpr uint32_t kAlone = uint32_t(1) << 30;  // instead of a run

  ZeroArray<PageRecord>& pages_;
  const EvictionRule& rule_;
  const bool is_alone_;
  ClassQueue<PageRecord> queue_;
  // Those of large pages without a used page, met while only others were wanted; they come
  // back when their large page is used again.
  ClassQueue<PageRecord, kAside> aside_;
};

}  // namespace kvell::memory
