// kvell.prefix._core: the compiled memory core, for callers that hold the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "state.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell::memory {
namespace {

// One-dimensional int32 values of an argument. Arrays of that type are read in place
// through the buffer protocol, which costs a tenth of nb::ndarray; anything else that
// numpy understands is converted first.
class IntsArgument {
 public:
  explicit IntsArgument(nb::handle value) {
    if (!read(value)) {
      converted_ = nb::module_::import_("numpy").attr("ascontiguousarray")(value, "int32");
      if (!read(converted_)) throw nb::type_error("expected one-dimensional int32 values");
    }
  }
  ~IntsArgument() { PyBuffer_Release(&view_); }
  IntsArgument(const IntsArgument&) = delete;
  IntsArgument& operator=(const IntsArgument&) = delete;

  Ints ints() const { return {static_cast<const int32_t*>(view_.buf), view_.len / 4}; }

 private:
  bool read(nb::handle value) {
    if (PyObject_GetBuffer(value.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
      PyErr_Clear();
      return false;
    }
    if (view_.ndim == 1 && view_.itemsize == 4 && view_.format && view_.format[0] == 'i')
      return true;
    PyBuffer_Release(&view_);
    return false;
  }

  nb::object converted_;
  Py_buffer view_{};
};

nb::object array_of(std::vector<Row>&& rows) {
  auto* kept = new std::vector<Row>(std::move(rows));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Row>*>(p); });
  const size_t count = kept->size();
  return nb::cast(nb::ndarray<nb::numpy, int32_t, nb::shape<-1, 4>>(
      reinterpret_cast<int32_t*>(kept->data()), {count, 4}, owner));
}

class Bound {
 public:
  Bound(const nb::sequence& groups, int32_t num_large, bool literal_order,
        const nb::sequence& quotas)
      : core_(rules(groups), num_large, {literal_order, counts(quotas)}), nothing_(array_of({})) {}

  Core& core() { return core_; }

  nb::tuple grow(nb::handle handles, nb::handle until) {
    const IntsArgument who(handles), length(until);
    std::vector<Row> rows;
    const int64_t served = core_.grow(who.ints(), length.ints(), rows);
    // Most steps cross no page boundary: one empty array serves them all.
    return nb::make_tuple(served, rows.empty() ? nothing_ : array_of(std::move(rows)));
  }

  nb::object held_pages(int32_t handle) {
    std::vector<Row> rows;
    core_.held_pages(handle, rows);
    return rows.empty() ? nothing_ : array_of(std::move(rows));
  }

 private:
  static Groups rules(const nb::sequence& groups) {
    Groups all;
    for (nb::handle group : groups) {
      const nb::sequence numbers = nb::cast<nb::sequence>(group);
      all.push_back({nb::cast<int32_t>(numbers[0]), nb::cast<int32_t>(numbers[1]),
                     Kind(nb::cast<int32_t>(numbers[2])), nb::cast<int64_t>(numbers[3])});
    }
    return all;
  }

  static Counts counts(const nb::sequence& numbers) {
    Counts all;
    for (nb::handle number : numbers) all.push_back(nb::cast<int64_t>(number));
    return all;
  }

  Core core_;
  nb::object nothing_;
};

}  // namespace
}  // namespace kvell::memory

NB_MODULE(_core, m) {
  using namespace kvell::memory;
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const UnknownHandle& unknown) {
      PyErr_SetObject(PyExc_KeyError, nb::int_(unknown.handle).ptr());
    }
  });
  nb::class_<Bound>(m, "CompiledCore")
      .def(nb::init<const nb::sequence&, int32_t, bool, const nb::sequence&>(), "groups"_a,
           "num_large_pages"_a, "literal_order"_a, "quota_large_pages"_a)
      .def("begin_step", [](Bound& b, int64_t step) { b.core().begin_step(step); }, "step"_a)
      .def("peek",
           [](Bound& b, nb::handle tokens, const std::string& root) {
             return b.core().peek(IntsArgument(tokens).ints(), root);
           },
           "tokens"_a, "root"_a)
      .def("open",
           [](Bound& b, nb::handle tokens, const std::string& root, std::optional<int64_t> until,
              bool reuse) {
             return b.core().open(IntsArgument(tokens).ints(), root, until, reuse);
           },
           "tokens"_a, "root"_a, "lease_until"_a = nb::none(), nb::kw_only(), "reuse"_a = true)
      .def("claim", [](Bound& b, int32_t h, int64_t expected) { b.core().claim(h, expected); },
           "handle"_a, "expected_tokens"_a)
      .def("hit_tokens", [](Bound& b, int32_t h) { return b.core().hit_tokens(h); }, "handle"_a)
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
      .def("close", [](Bound& b, int32_t h, bool renew) { b.core().close(h, renew); }, "handle"_a,
           nb::kw_only(), "renew"_a = true)
      .def("division", [](Bound& b) { return totals_of(b.core()); })
      .def("state", [](Bound& b) { return state_of(b.core()); });
}
