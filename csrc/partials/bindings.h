// The Python face of what asks others for sections, and of what answers.
#pragma once
#include <nanobind/nanobind.h>

namespace kvell {

void bind_partials(nanobind::module_& m);

}  // namespace kvell
