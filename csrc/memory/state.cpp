#include "state.h"

namespace nb = nanobind;

namespace kvell::memory {
namespace {

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

nb::tuple entry_of(const Core& core, int32_t group, int32_t page, const PageRecord& record) {
  const Node& node = core.tree().node(record.node);
  return nb::make_tuple(group, page, record.position, node.start, node.end());
}

// Per group: page → users, page → key; and what the index names.
nb::tuple pages_of(Core& core) {
  Pool& pool = core.pool();
  nb::list refs, keys, index;
  for (size_t g = 0; g < core.groups().size(); ++g) {
    refs.append(nb::dict());
    keys.append(nb::dict());
  }
  for (int32_t id = 0; id < pool.num_large(); ++id) {
    const int32_t group = pool.large(id).group();
    if (group < 0) continue;
    for (int32_t i = 0; i < pool.per_large(group); ++i) {
      const int32_t slot = pool.first_slot(id) + i, page = pool.page_of(group, slot);
      const PageRecord& record = pool.page(slot);
      if (record.refs) refs[group][nb::int_(page)] = record.refs;
      if (!record.node) continue;
      const Key key = record.key;
      keys[group][nb::int_(page)] = nb::make_tuple(rank_of(key), time_of(key), -prefix_of(key));
      index.append(entry_of(core, group, page, record));
    }
  }
  return nb::make_tuple(nb::tuple(refs), nb::tuple(keys), nb::tuple(index));
}

nb::tuple holder_of(Core& core, const Holder& holder) {
  nb::list groups;
  for (size_t g = 0; g < holder.groups.size(); ++g) {
    nb::list pages;
    for (const int32_t slot : holder.groups[g].slots)
      pages.append(core.pool().page_of(int32_t(g), slot));
    groups.append(nb::make_tuple(holder.groups[g].first, nb::tuple(pages)));
  }
  return nb::make_tuple(holder.handle, holder.computed, holder.published,
                        holder.lease_until.has_value(), nb::tuple(groups));
}

template <class Numbers>
nb::tuple numbers(const Numbers& values) {
  nb::list list;
  for (const int64_t value : values) list.append(value);
  return nb::tuple(list);
}

}  // namespace

nb::tuple totals_of(Core& core) {
  const Pool& pool = core.pool();
  const size_t width = core.groups().size();
  std::vector<int64_t> used(width), cached(width), unwritten(width), stranded(width);
  int64_t empty = pool.num_large() - pool.num_touched();
  for (int32_t id = 0; id < pool.num_touched(); ++id) {
    const LargeRecord& large = pool.large(id);
    if (large.group() < 0) {
      ++empty;
      continue;
    }
    used[large.group()] += large.used;
    cached[large.group()] += large.cached;
    if (!large.used) continue;
    unwritten[large.group()] += pool.per_large(large.group()) - large.written;
    stranded[large.group()] += large.written - large.used;
  }
  return nb::make_tuple(empty, numbers(used), numbers(cached),
                        numbers(core.placer().evicted_pages()), core.total_hit_tokens(),
                        numbers(core.placer().rungs()), numbers(unwritten), numbers(stranded),
                        numbers(core.group_hit_tokens()));
}

nb::tuple state_of(Core& core) {
  nb::list holders;
  for (const Holder* holder : core.holders()) holders.append(holder_of(core, *holder));
  const Pool& pool = core.pool();
  return nb::make_tuple(larges_of(pool), pages_of(core), pool.whole(), numbers(pool.partial()),
                        nb::tuple(holders), core.tree().num_nodes(),
                        numbers(core.placer().evicted_pages()), core.total_hit_tokens(),
                        numbers(core.placer().rungs()));
}

}  // namespace kvell::memory
