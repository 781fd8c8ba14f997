// kvell.engine.running._tables: page tables and a step's metadata, for callers that hold the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <optional>
#include <tuple>

#include "python/arrays.h"
#include "tables.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell::batching {
namespace {

// page_tokens, pages_per_large, window_tokens (0: none), chunk_tokens (0: none)
using GroupArgs = std::tuple<int32_t, int32_t, int64_t, int64_t>;

Group group_of(const GroupArgs& args) {
  const auto& [page_tokens, pages_per_large, window, chunk] = args;
  if (page_tokens < 1 || pages_per_large < 1)
    throw nb::value_error("groups: pages hold tokens, and large pages hold pages");
  memory::Rules rules{};
  rules.page_tokens = page_tokens;
  rules.pages_per_large = pages_per_large;
  rules.kind = window  ? memory::Kind::kSliding
               : chunk ? memory::Kind::kChunked
                       : memory::Kind::kFull;
  rules.window_tokens = window + chunk;
  return {rules};
}

// With its address, which Python's own way to it takes long to find.
template <typename Number>
nb::tuple addressed(std::vector<Number>&& numbers) {
  const auto address = reinterpret_cast<uintptr_t>(numbers.data());
  return nb::make_tuple(array_of(std::move(numbers)), address);  // a vector keeps its place
}

class Bound {
 public:
  explicit Bound(const std::vector<GroupArgs>& groups) : tables_(groups_of(groups)) {}

  void update(const Longs& released, nb::handle new_pages) {
    for (int64_t handle : released) tables_.forget(handle);
    tables_.put(IntsArgument(new_pages, 4).ints());
  }

  nb::object pages(int64_t handle, int64_t group) const {
    return array_of(std::vector<int32_t>(tables_.pages(handle, group)));
  }

  nb::tuple arrays(int64_t group, Longs handles, Longs starts, Longs counts,
                   const Longs& away) const {
    if (!away.empty() && away.size() != handles.size())
      throw nb::value_error("away: tokens for each handle, or none");
    const Work work = work_of(std::move(handles), std::move(starts), std::move(counts));
    return addressed(tables_.arrays(group, work, away));
  }

  nb::tuple states(int64_t group, Longs handles, Longs starts, Longs counts,
                   int64_t slices) const {
    const Work work = work_of(std::move(handles), std::move(starts), std::move(counts));
    return addressed(tables_.states(group, work, slices));
  }

 private:
  static Work work_of(Longs handles, Longs starts, Longs counts) {
    if (starts.size() != handles.size() || counts.size() != handles.size())
      throw nb::value_error("work: a start and a count for each handle");
    return {std::move(handles), std::move(starts), std::move(counts)};
  }

  static std::vector<Group> groups_of(const std::vector<GroupArgs>& args) {
    std::vector<Group> groups;
    for (const GroupArgs& one : args) groups.push_back(group_of(one));
    return groups;
  }

  PageTables tables_;
};

nb::tuple rows_of(const Longs& starts, const Longs& counts, const Longs& logits,
                  const nb::sequence& token_ids) {
  if (counts.size() != starts.size() || logits.size() != starts.size())
    throw nb::value_error("work: a count, and a number of logits, for each start");
  std::deque<IntsArgument> given;  // they are views, which do not move
  std::vector<Ints> ids;
  for (nb::handle one : token_ids) ids.push_back(given.emplace_back(one).ints());
  return addressed(token_rows(starts, counts, logits, ids));
}

}  // namespace
}  // namespace kvell::batching

NB_MODULE(_tables, m) {
  using kvell::batching::Bound;
  m.doc() = "Page tables, compiled. Use kvell.engine.running.batching.";
  nb::register_exception_translator([](const std::exception_ptr& raised, void*) {
    try {
      std::rethrow_exception(raised);
    } catch (const kvell::batching::UnknownHandle& unknown) {
      PyErr_SetObject(PyExc_KeyError, nb::int_(unknown.handle).ptr());
    }
  });
  nb::class_<Bound>(m, "PageTables")
      .def(nb::init<const std::vector<kvell::batching::GroupArgs>&>(), "groups"_a)
      .def("update", &Bound::update, "released"_a, "new_pages"_a)
      .def("pages", &Bound::pages, "handle"_a, "group"_a)
      .def("arrays", &Bound::arrays, "group"_a, "handles"_a, "starts"_a, "counts"_a,
           "away"_a)
      .def("states", &Bound::states, "group"_a, "handles"_a, "starts"_a, "counts"_a,
           "slices"_a);
  m.def("token_rows", &kvell::batching::rows_of, "starts"_a, "counts"_a, "logits"_a,
        "token_ids"_a);
}
