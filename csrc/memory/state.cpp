#include "state.h"

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace kvell::memory {
namespace {

constexpr int64_t kWithheldGroup = -2;  // WITHHELD_GROUP in prefix/interface.py
constexpr int kPrefixBits = 32;  // PREFIX_BITS in tests/oracle/eviction/hazard_rule.py

nb::object mask_of(const Pool& pool, int32_t large) {
  nb::object mask = nb::int_(0);
  for (int32_t word = pool.mask_words(); word-- > 0;)
    mask = (mask << nb::int_(64)) | nb::int_(pool.mask_word(large, word));
  return mask;
}

nb::tuple larges_of(const Pool& pool) {
  nb::list group, owner, used, cached, masks;
  for (int32_t id = 0; id < pool.num_large(); ++id) {
    const LargeRecord& large = pool.large(id);
    group.append(large.group());
    owner.append(large.owner == kShared ? -1 : large.owner);
    used.append(large.used);
    cached.append(large.cached);
    masks.append(mask_of(pool, id));
  }
  return nb::make_tuple(nb::tuple(group), nb::tuple(owner), nb::tuple(used), nb::tuple(cached),
                        nb::tuple(masks));
}

nb::tuple entry_of(Store& store, int32_t group, int32_t slot) {
  const PageRecord& record = store.pool.page(slot);
  const Node& node = store.tree.node(record.node);
  return nb::make_tuple(group, store.pool.page_of(group, slot), record.end,
                        store.tree.part_of(group, slot), node.start, node.end());
}

// Per group: page → users, page → key; and what the index names.
nb::tuple pages_of(Store& store) {
  Pool& pool = store.pool;
  nb::list refs, keys, index;
  for (size_t g = 0; g < store.groups.size(); ++g) {
    refs.append(nb::dict());
    keys.append(nb::dict());
  }
  for (int32_t id = 0; id < pool.num_large(); ++id) {
    const int32_t group = pool.large(id).group();
    if (group < 0) continue;
    for (int32_t i = 0; i < pool.per_large(group); ++i) {
      const int32_t slot = pool.first_slot(id) + i, page = pool.page_of(group, slot);
      const PageRecord& record = pool.page(slot);
      if (const int32_t users = record.users()) refs[group][nb::int_(page)] = users;
      if (!record.node) continue;
      const Key key = record.key;
      keys[group][nb::int_(page)] = nb::make_tuple(
          rank_of(key), time_of(key), (int64_t(class_of(key)) << kPrefixBits) - prefix_of(key));
      index.append(entry_of(store, group, slot));
    }
  }
  return nb::make_tuple(nb::tuple(refs), nb::tuple(keys), nb::tuple(index));
}

// (group, page) that the holder uses but not as its own: to copy, to write states to.
nb::tuple others_of(const Pool& pool, const Holder& holder) {
  nb::list others;
  for (const Source& source : holder.sources)
    others.append(nb::make_tuple(source.group, pool.page_of(source.group, source.slot)));
  for (const Checkpoint& checkpoint : holder.checkpoints)
    for (const int32_t slot : checkpoint.slots)
      others.append(nb::make_tuple(checkpoint.group, pool.page_of(checkpoint.group, slot)));
  return nb::tuple(others);
}

nb::tuple holder_of(const Pool& pool, const Holder& holder) {
  nb::list groups;
  for (size_t g = 0; g < holder.groups.size(); ++g) {
    nb::list pages;
    for (const int32_t slot : holder.groups[g].slots) pages.append(pool.page_of(int32_t(g), slot));
    groups.append(nb::make_tuple(holder.groups[g].first, nb::tuple(pages)));
  }
  return nb::make_tuple(holder.handle, holder.computed, holder.published,
                        holder.lease_until.has_value(), nb::tuple(groups),
                        others_of(pool, holder), holder.receiving, holder.is_reservation,
                        holder.facts.away_tokens);
}

template <class Numbers>
nb::tuple numbers(const Numbers& values) {
  nb::list list;
  for (const int64_t value : values) list.append(value);
  return nb::tuple(list);
}

}  // namespace

nb::tuple evicted_of(Core& core) { return numbers(core.store().placer.evicted_pages()); }

nb::tuple totals_of(Core& core) {
  const Pool& pool = core.store().pool;
  const Placer& placer = core.store().placer;
  const Division division = pool.division();
  return nb::make_tuple(division.empty_large, numbers(division.used), numbers(division.cached),
                        numbers(placer.evicted_pages()), core.total_hit_tokens(),
                        numbers(placer.rungs()), numbers(division.unwritten),
                        numbers(division.stranded), numbers(core.group_hit_tokens()),
                        numbers(core.checkpoint_pages()));
}

std::vector<int64_t> large_rows(Core& core) {
  const Pool& pool = core.store().pool;
  std::vector<int64_t> rows;
  rows.reserve(size_t(pool.num_large()) * 4);
  for (int32_t id = 0; id < pool.num_large(); ++id) {
    const LargeRecord& large = pool.large(id);
    const bool is_withheld = pool.empties().is_withheld(id), is_kept = large.cached && !large.used;
    const int64_t step = is_kept ? time_of(pool.youngest(id)) : -1;
    rows.insert(rows.end(), {is_withheld ? kWithheldGroup : large.group(), large.used, large.cached, step});
  }
  return rows;
}

std::vector<int64_t> small_rows(Core& core, int32_t large) {
  Pool& pool = core.store().pool;
  if (large < 0 || large >= pool.num_large())
    throw std::invalid_argument("there is no such large page: they are 0 to " +
                                std::to_string(pool.num_large() - 1));
  std::vector<int64_t> rows;
  const int32_t group = pool.large(large).group();
  for (int32_t i = 0; group >= 0 && i < pool.per_large(group); ++i) {
    const int32_t slot = pool.first_slot(large) + i;
    const PageRecord& page = pool.page(slot);
    const int64_t step = page.node ? time_of(page.key) : -1;
    rows.insert(rows.end(), {pool.page_of(group, slot), page.users(), page.node ? page.end : -1, step});
  }
  return rows;
}

nb::tuple state_of(Core& core) {
  Store& store = core.store();
  nb::list holders;
  nb::list withheld;
  for (int32_t id = 0; id < store.pool.num_large(); ++id)
    if (store.pool.empties().is_withheld(id)) withheld.append(id);
  for (const Holder* holder : core.holders()) holders.append(holder_of(store.pool, *holder));
  return nb::make_tuple(larges_of(store.pool), pages_of(store), store.pool.supply().whole(),
                        numbers(store.pool.supply().partial()), nb::tuple(holders), store.tree.num_nodes(),
                        numbers(store.placer.evicted_pages()), core.total_hit_tokens(),
                        numbers(store.placer.rungs()), nb::tuple(withheld));
}

}  // namespace kvell::memory
