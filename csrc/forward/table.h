// One instruction set's kernels, for either element of a model.
#pragma once
#include "gate.h"
#include "grouped.h"
#include "product.h"
#include "rows.h"
#include "scan.h"

namespace {

template <class K>
void product(const Product& made, kvell::Activation activation, int64_t panel_begin,
             int64_t panel_end, int64_t row_begin, int64_t row_end, bool again, const uint8_t* next) {
  using kvell::Form;
  using Int8 = typename K::template FewBits<Form::int8>;
  using Int4 = typename K::template FewBits<Form::int4>;
  const auto run = made.matrix->form == Form::plain    ? product_of<K, typename K::Plain>
                   : made.matrix->form == Form::int8 ? product_of<K, Int8>
                                                       : product_of<K, Int4>;
  run(made, activation, panel_begin, panel_end, row_begin, row_end, again, next);
}

template <class K>
const kvell::Kernels* kernels_of(const char* name) {
  static const kvell::Kernels kernels{name,           K::kElement,   K::Plain::kPace,
                                      product<K>,     norm_row<K>,   place_token<K>,
                                      embed_row<K>,   convolve<K>,   scan_head<K>,
                                      gate_row<K>};
  return &kernels;
}

template <class Pairs, class Floats>
const kvell::Kernels* table_of(const char* name, kvell::Element element) {
  if (element == kvell::Element::bfloat16) return kernels_of<Pairs>(name);
  return element == kvell::Element::float32 ? kernels_of<Floats>(name) : nullptr;
}

}  // namespace
