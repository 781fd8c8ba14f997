// The Python face: integers in, nothing allocated for Python, the GIL released.
//
// Pointers come as integers because array arguments would cost more than a small linear
// takes. models/forward/small_linear.py checks dtypes, shapes and strides.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell {
namespace {

const uint16_t* at(uintptr_t address) { return reinterpret_cast<const uint16_t*>(address); }

void linear_args(const char* instruction_set, uintptr_t weight, uintptr_t bias, uintptr_t x,
                 uintptr_t y, int64_t out, int64_t in, int64_t rows, int64_t x_stride,
                 int64_t y_stride, int num_threads) {
  const LinearBackend* backend = linear_backend_named(instruction_set);
  if (!backend)
    throw std::invalid_argument(std::string("instruction_set: this processor has no ") +
                                instruction_set);
  if (out < 0 || in < 1 || rows < 0) throw std::invalid_argument("linear: sizes must be positive");
  if (out == 0 || rows == 0) return;
  run_linear(*backend,
             {at(weight), at(bias), at(x), reinterpret_cast<uint16_t*>(y), out, in, rows,
              x_stride, y_stride},
             num_threads);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (int i = 0; const LinearBackend* backend = linear_backend_at(i); ++i)
    names.emplace_back(backend->name);
  return names;
}

}  // namespace
}  // namespace kvell

NB_MODULE(_linear, m) {
  m.doc() = "Linears over few rows, compiled. Use kvell.models.forward.small_linear.";
  m.def("instruction_sets", &kvell::instruction_sets,
        "Names of the instruction sets that this build has and this processor runs, best first.");
  m.def("linear", &kvell::linear_args, "instruction_set"_a, "weight"_a, "bias"_a, "x"_a, "y"_a,
        "out"_a, "in_"_a, "rows"_a, "x_stride"_a, "y_stride"_a, "num_threads"_a,
        nb::call_guard<nb::gil_scoped_release>());
}
