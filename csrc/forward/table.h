// One instruction set's kernels, for either element of a model.
#pragma once
#include "product.h"
#include "rows.h"

namespace {

template <class K>
const kvell::Kernels* kernels_of(const char* name) {
  static const kvell::Kernels kernels{name,           K::kElement,    product<K>,
                                      norm_row<K>,    place_token<K>, embed_row<K>};
  return &kernels;
}

template <class Pairs, class Floats>
const kvell::Kernels* table_of(const char* name, kvell::Element element) {
  if (element == kvell::Element::bfloat16) return kernels_of<Pairs>(name);
  return element == kvell::Element::float32 ? kernels_of<Floats>(name) : nullptr;
}

}  // namespace
