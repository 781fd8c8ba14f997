// kvell.prefix._core: the compiled memory core, for callers that hold the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "fit.h"
#include "python/arrays.h"
#include "state.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell::memory {
namespace {

template <size_t kColumns>
nb::object table_of(std::vector<Row<kColumns>>&& rows) {
  using Rows = std::vector<Row<kColumns>>;
  auto* kept = new Rows(std::move(rows));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Rows*>(p); });
  const size_t count = kept->size();
  return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::shape<-1, kColumns>>(
      reinterpret_cast<int32_t*>(kept->data()), {count, kColumns}, owner));
}

// Float64 of numpy's as bytes, so many of them.
const double* numbers_of(const nb::bytes& given, size_t count, const char* what) {
  if (given.size() != count * sizeof(double))
    throw nb::value_error((std::string(what) + " of another size").c_str());
  return reinterpret_cast<const double*>(given.c_str());
}

nb::bytes bytes_of(const std::vector<double>& numbers) {
  return nb::bytes(numbers.data(), numbers.size() * sizeof(double));
}

// (rules of a group, its model) as kvell.prefix.core.compiled gives them.
struct GivenGroups {
  explicit GivenGroups(const nb::sequence& given) {
    for (nb::handle group : given) {
      const nb::sequence one = nb::cast<nb::sequence>(group);
      const auto number = [&](int at) { return nb::cast<int64_t>(one[at]); };
      const auto flag = [&](int at) { return nb::cast<bool>(one[at]); };
      groups.push_back({int32_t(number(0)), int32_t(number(1)), Kind(number(2)), number(3),
                        int32_t(number(4)), flag(5), flag(6), flag(7), number(8), number(9)});
      names.push_back(nb::cast<std::string>(one[10]));
    }
  }

  Groups groups;
  std::vector<std::string> names;
};

class Bound {
 public:
  Bound(const GivenGroups& given, int32_t num_large, int64_t large_page_bytes,
        bool literal_order, const nb::sequence& quotas, const nb::tuple& learning,
        nb::object refit)
      : core_(given.groups, given.names, num_large,
              {large_page_bytes, literal_order, counts(quotas)}, settings(learning)),
        refit_(std::move(refit)),
        no_pages_(table_of(PageRows())),
        no_states_(table_of(StateRows())) {}

  Core& core() { return core_; }

  nb::tuple grow(nb::handle handles, nb::handle until) {
    const IntsArgument who(handles), length(until);
    PageRows rows;
    const int64_t served = core_.grow(who.ints(), length.ints(), rows);
    // Most steps cross no page boundary: one empty array serves them all.
    return nb::make_tuple(served, page_rows(std::move(rows)));
  }

  nb::object held_pages(int32_t handle) {
    PageRows rows;
    core_.held_pages(handle, rows);
    return page_rows(std::move(rows));
  }

  nb::object known(nb::handle tokens, const std::string& root, const std::string& model) {
    const IntsArgument text(tokens);
    PageRows rows;
    core_.known({text.ints(), root, model, std::nullopt, {nullptr, 0}}, rows);
    return page_rows(std::move(rows));
  }

  nb::object sources(int32_t handle) {
    PageRows rows;
    core_.sources(handle, rows);
    return page_rows(std::move(rows));
  }

  nb::object compact(int64_t most_large) {
    PageRows rows;
    core_.compact(most_large, rows);
    return page_rows(std::move(rows));
  }

  void claim(int32_t handle, int64_t expected_tokens, std::optional<bool> will_return) {
    const Hint hint = !will_return ? Hint::kNone : *will_return ? Hint::kReturns : Hint::kEnds;
    core_.claim(handle, expected_tokens, hint);
  }

  void close(int32_t handle, bool renew, bool returns) {
    core_.close(handle, renew, returns);
    if (core_.is_learning_due()) learn();
  }

  nb::object copies() { return page_rows(core_.copies()); }

  nb::object index_changes() {
    ChangeRows rows = core_.store().changes.taken();
    return rows.empty() ? no_states_ : table_of(std::move(rows));
  }

  nb::object checkpoint(nb::handle handles, nb::handle until) {
    const IntsArgument who(handles), length(until);
    StateRows rows;
    core_.checkpoint(who.ints(), length.ints(), rows);
    return rows.empty() ? no_states_ : table_of(std::move(rows));
  }

 private:
  nb::object page_rows(PageRows&& rows) {
    return rows.empty() ? no_pages_ : table_of(std::move(rows));
  }

  static Counts counts(const nb::sequence& numbers) {
    Counts all;
    for (nb::handle number : numbers) all.push_back(nb::cast<int64_t>(number));
    return all;
  }

  static HazardSettings settings(const nb::tuple& learning) {
    if (!learning.size()) return {};
    const auto number = [&](int at) { return nb::cast<int64_t>(learning[at]); };
    return {number(0), number(1), number(2), counts(nb::cast<nb::sequence>(learning[3]))};
  }

  // Rare, and told by whoever made the rule: how, and when again.
  void learn() {
    const HazardTable& table = core_.store().rule.table();
    const nb::tuple told =
        nb::cast<nb::tuple>(refit_(bytes_of(table.entered()), bytes_of(table.returned()),
                                   bytes_of(table.events()), table.requests()));
    const nb::bytes index = nb::cast<nb::bytes>(told[0]);
    constexpr size_t kCount = size_t(kClasses) * kAges;
    const double* numbers = numbers_of(index, kCount, "an index");
    std::vector<double> values(numbers, numbers + kCount);
    core_.learn(std::move(values), nb::cast<double>(told[1]), nb::cast<int64_t>(told[2]));
  }

  Core core_;
  nb::object refit_;  // a function of a module: nothing that refers back
  nb::object no_pages_, no_states_;
};

nb::bytes fit(const nb::bytes& entered, const nb::bytes& returned, const nb::bytes& events,
              const std::vector<int64_t>& bounds) {
  constexpr size_t kCounts = size_t(kClasses) * kAges;
  if (bounds.size() != size_t(kAges) + 1) throw nb::value_error("bounds of another size");
  const std::vector<double> index =
      fitted(numbers_of(entered, kCounts, "counts"), numbers_of(returned, kCounts, "counts"),
             numbers_of(events, kClasses, "counts"), bounds.data());
  return bytes_of(index);
}

}  // namespace
}  // namespace kvell::memory

NB_MODULE(_core, m) {
  using namespace kvell::memory;
  using kvell::array_of;
  using kvell::IntsArgument;
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const UnknownHandle& unknown) {
      PyErr_SetObject(PyExc_KeyError, nb::int_(unknown.handle).ptr());
    } catch (const UnknownModel& unknown) {
      const nb::str name(unknown.name.c_str(), unknown.name.size());
      PyErr_Format(PyExc_ValueError, "no group of the pool belongs to model %R", name.ptr());
    }
  });
  m.def("fit", &fit, "entered"_a, "returned"_a, "events"_a, "bounds"_a);
  nb::class_<Bound>(m, "CompiledCore")
      .def("__init__",
           [](Bound* self, const nb::sequence& groups, int32_t num_large,
              int64_t large_page_bytes, bool literal_order, const nb::sequence& quotas,
              const nb::tuple& learning, nb::object refit) {
             new (self) Bound(GivenGroups(groups), num_large, large_page_bytes, literal_order,
                              quotas, learning, std::move(refit));
           },
           "groups"_a, "num_large_pages"_a, "large_page_bytes"_a, "literal_order"_a,
           "quota_large_pages"_a, "learning"_a = nb::tuple(), "refit"_a = nb::none())
      .def("add_groups",
           [](Bound& b, const nb::sequence& groups) {
             const GivenGroups given(groups);
             b.core().add_groups(given.groups, given.names);
           },
           "groups"_a)
      .def("begin_step", [](Bound& b, int64_t step) { b.core().begin_step(step); }, "step"_a)
      .def("peek",
           [](Bound& b, nb::handle tokens, const std::string& root, nb::handle images,
              std::optional<int64_t> prompt_tokens, const std::string& model) {
             const IntsArgument text(tokens), spans(images, 3);
             return b.core().peek({text.ints(), root, model, prompt_tokens, spans.ints()});
           },
           "tokens"_a, "root"_a, nb::kw_only(), "images"_a = nb::none(),
           "prompt_tokens"_a = nb::none(), "model"_a = "")
      .def("known", &Bound::known, "tokens"_a, "root"_a, nb::kw_only(), "model"_a = "")
      .def("open",
           [](Bound& b, nb::handle tokens, const std::string& root, std::optional<int64_t> until,
              bool reuse, nb::handle images, std::optional<int64_t> prompt_tokens,
              const std::string& model) {
             const auto text = std::make_shared<IntsArgument>(tokens);
             const IntsArgument spans(images, 3);
             return b.core().open(
                 {text->ints(), root, model, prompt_tokens, spans.ints(), text}, until, reuse);
           },
           "tokens"_a, "root"_a, "lease_until"_a = nb::none(), nb::kw_only(), "reuse"_a = true,
           "images"_a = nb::none(), "prompt_tokens"_a = nb::none(), "model"_a = "")
      .def("claim", &Bound::claim, "handle"_a, "expected_tokens"_a, nb::kw_only(),
           "will_return"_a = nb::none())
      .def("hit_tokens", [](Bound& b, int32_t h) { return b.core().hit_tokens(h); }, "handle"_a)
      .def("receive", [](Bound& b, int32_t h, int64_t computed) { b.core().receive(h, computed); },
           "handle"_a, "computed"_a)
      .def("sources", &Bound::sources, "handle"_a)
      .def("reserve",
           [](Bound& b, nb::handle counts, int64_t lease_until, const std::string& model) {
             const IntsArgument need(counts);
             return b.core().reserve(need.ints(), lease_until, model);
           },
           "counts"_a, "lease_until"_a, nb::kw_only(), "model"_a = "")
      .def("adopt",
           [](Bound& b, int32_t h, nb::handle tokens, const std::string& root,
              std::optional<int64_t> prompt_tokens) {
             const IntsArgument text(tokens);
             b.core().adopt(h, text.ints(), root, prompt_tokens);
           },
           "handle"_a, "tokens"_a, "root"_a, nb::kw_only(), "prompt_tokens"_a = nb::none())
      .def("delete",
           [](Bound& b, nb::handle tokens, const std::string& root, const std::string& model) {
             const IntsArgument text(tokens);
             return b.core().erase(text.ints(), root, model);
           },
           "tokens"_a, "root"_a, nb::kw_only(), "model"_a = "")
      .def("grow", &Bound::grow, "handles"_a, "until"_a)
      .def("largest", [](Bound& b, int32_t h, int64_t until) { return b.core().largest(h, until); },
           "handle"_a, "until"_a)
      .def("held_pages", &Bound::held_pages, "handle"_a)
      .def("fits",
           [](Bound& b, int32_t h, int64_t until, int64_t chunk, nb::handle others,
              nb::handle others_until) {
             const IntsArgument who(others), length(others_until);
             return b.core().fits(h, until, chunk, who.ints(), length.ints());
           },
           "handle"_a, "until"_a, "chunk_tokens"_a, "others"_a, "others_until"_a)
      .def("may_fit", [](Bound& b) { return b.core().may_fit(); })
      .def("copies", &Bound::copies)
      .def("compact", &Bound::compact, "most_large"_a)
      .def("checkpoint", &Bound::checkpoint, "handles"_a, "until"_a)
      .def("append",
           [](Bound& b, nb::handle handles, nb::handle tokens) {
             const IntsArgument who(handles), what(tokens);
             b.core().append(who.ints(), what.ints());
           },
           "handles"_a, "tokens"_a)
      .def("advance",
           [](Bound& b, nb::handle handles, nb::handle computed) {
             const IntsArgument who(handles), length(computed);
             b.core().advance(who.ints(), length.ints());
           },
           "handles"_a, "computed"_a)
      .def("close", &Bound::close, "handle"_a, nb::kw_only(), "renew"_a = true,
           "returns"_a = false)
      .def("send_away",
           [](Bound& b, int32_t h, int64_t away) { b.core().send_away(h, away); }, "handle"_a,
           "away_tokens"_a)
      .def("reclaim_order", [](Bound& b) { return array_of(b.core().withholder().reclaim_order()); })
      .def("withhold",
           [](Bound& b, nb::handle larges) {
             const IntsArgument which(larges);
             b.core().withholder().withhold(which.ints());
           },
           "larges"_a)
      .def("restore",
           [](Bound& b, nb::handle larges) {
             const IntsArgument which(larges);
             b.core().withholder().restore(which.ints());
           },
           "larges"_a)
      .def("watch_index", [](Bound& b) { b.core().store().changes.watch(); })
      .def("index_changes", &Bound::index_changes)
      .def("empty_large_pages", [](Bound& b) { return b.core().store().pool.num_empty(); })
      .def("evicted_pages", [](Bound& b) { return evicted_of(b.core()); })
      .def("large_rows", [](Bound& b) { return array_of(large_rows(b.core())); })
      .def("small_rows",
           [](Bound& b, int32_t large) { return array_of(small_rows(b.core(), large)); }, "large"_a)
      .def("reach",
           [](Bound& b, nb::handle tokens, const std::string& root, nb::handle images,
              std::optional<int64_t> prompt_tokens, const std::string& model) {
             const IntsArgument text(tokens), spans(images, 3);
             return array_of(
                 b.core().reach({text.ints(), root, model, prompt_tokens, spans.ints()}));
           },
           "tokens"_a, "root"_a, nb::kw_only(), "images"_a = nb::none(),
           "prompt_tokens"_a = nb::none(), "model"_a = "")
      .def("division", [](Bound& b) { return totals_of(b.core()); })
      .def("state", [](Bound& b) { return state_of(b.core()); });
}
