// Arrays of numpy's as arguments and as answers of extension modules.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "memory/facts.h"

namespace kvell {

namespace nb = nanobind;

// int32 values of an argument: one-dimensional, or rows of so many columns. Arrays of that
// type are read in place through the buffer protocol, which costs a tenth of nb::ndarray;
// anything else that numpy understands is converted first.
class IntsArgument {
 public:
  explicit IntsArgument(nb::handle value, int64_t columns = 0) : columns_(columns) {
    if (value.is_none() && columns) return;
    if (!read(value)) {
      converted_ = nb::module_::import_("numpy").attr("ascontiguousarray")(value, "int32");
      if (!read(converted_))
        throw nb::type_error(columns ? "expected rows of int32 values"
                                     : "expected one-dimensional int32 values");
    }
  }
  ~IntsArgument() { PyBuffer_Release(&view_); }
  IntsArgument(const IntsArgument&) = delete;
  IntsArgument& operator=(const IntsArgument&) = delete;

  memory::Ints ints() const { return {static_cast<const int32_t*>(view_.buf), view_.len / 4}; }

 private:
  bool read(nb::handle value) {
    if (PyObject_GetBuffer(value.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) {
      PyErr_Clear();
      return false;
    }
    const bool is_shaped = columns_ ? view_.ndim == 2 && view_.shape[1] == columns_
                                    : view_.ndim == 1;
    if (is_shaped && view_.itemsize == 4 && view_.format && view_.format[0] == 'i') return true;
    PyBuffer_Release(&view_);
    return false;
  }

  const int64_t columns_;
  nb::object converted_;
  Py_buffer view_{};
};

// A numpy array that owns these numbers.
template <typename Number>
nb::object array_of(std::vector<Number>&& numbers) {
  using Numbers = std::vector<Number>;
  auto* kept = new Numbers(std::move(numbers));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Numbers*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, Number, nb::shape<-1>>(kept->data(), {kept->size()}, owner));
}

}  // namespace kvell
