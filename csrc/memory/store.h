// What one memory core is made of: pool, index and who places pages (tests/oracle/placement/store.py).
#pragma once
#include "changes.h"
#include "eviction.h"
#include "placer.h"
#include "usefulness.h"

namespace kvell::memory {

struct Store {
  Store(Groups all, int32_t num_large, const Sharing& sharing, const HazardSettings& learning)
      : groups(std::move(all)),
        rule(learning),
        pool(groups, num_large, sharing.quotas, rule),
        tree(groups, pool),
        changes(pool),
        placer(groups, pool, tree, changes, usefulness, sharing.literal_order),
        large_page_bytes(sharing.large_page_bytes) {}
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  Groups groups;  // of all models; the parts refer to them
  EvictionRule rule;
  Pool pool;
  RadixTree tree;
  Usefulness usefulness;
  IndexChanges changes;
  Placer placer;
  const int64_t large_page_bytes;
  int64_t step = 0;  // the time
};

}  // namespace kvell::memory
