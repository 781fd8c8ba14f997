// Functions of one row: norm, rotation, embedding, and storing a vector in a page.
#pragma once
#include <cmath>
#include <cstring>

#include "finish.h"
#include "half.h"
#include "product.h"
#include "kernels.h"
#include "store.h"

namespace {

using kvell::Norm;

// 1/√(mean of squares + ε), summed in an order that depends on `size` alone.
template <class L>
float inverse_root(const float* x, int64_t size, float epsilon) {
  auto sum = L::zero();
  int64_t i = 0;
  for (; i + L::kWidth <= size; i += L::kWidth) {
    const auto v = L::load(x + i);
    sum = L::madd(v, v, sum);
  }
  float total = L::sum(sum);
  for (; i < size; ++i) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(size) + epsilon);
}

template <class L>
void scale_row(const float* x, Norm norm, int64_t size, float* y) {
  const float scale = inverse_root<L>(x, size, norm.epsilon);
  for (int64_t i = 0; i < size; ++i) y[i] = x[i] * scale * norm.weight[i];
}

template <class K>
void norm_row(float* h, const float* branch, Norm branch_norm, float factor, Norm norm, void* x,
              int64_t size) {
  using L = typename K::Lanes;
  if (branch) {
    const float scale = factor * inverse_root<L>(branch, size, branch_norm.epsilon);
    for (int64_t i = 0; i < size; ++i) h[i] += branch[i] * scale * branch_norm.weight[i];
  }
  if (!norm) return;
  constexpr int64_t kPart = 64;
  const float scale = inverse_root<L>(h, size, norm.epsilon);
  auto* to = static_cast<typename K::Element*>(x);
  for (int64_t i = 0; i < size; i += kPart) {
    alignas(64) float part[kPart];
    const int64_t count = size - i < kPart ? size - i : kPart;
    for (int64_t j = 0; j < count; ++j) part[j] = h[i + j] * scale * norm.weight[i + j];
    K::store_elements(to + i, part, count);
  }
}

// (a, b) → (a cos − b sin, b cos + a sin), where b is `half` behind a.
KVELL_INLINE void rotate(float* x, const kvell::Rotation& rotation) {
  const int64_t half = rotation.half;
  const float *cosines = rotation.cosines, *sines = cosines + half;
  float* y = x + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = y[i];
    x[i] = a * cosines[i] - b * sines[i];
    y[i] = b * cosines[i] + a * sines[i];
  }
}

template <class K>
void place_token(const kvell::Placement& place) {
  using L = typename K::Lanes;
  const kvell::Layer& pages = *place.pages;
  const int64_t size = pages.head_size, row_bytes = pages.row_bytes();
  float* x = place.qkv;
  auto* query = static_cast<typename K::Element*>(place.query);
  for (int64_t head = 0; head < place.heads; ++head, x += size, query += size) {
    if (place.query_norm) scale_row<L>(x, place.query_norm, size, x);
    rotate(x, place.rotation);
    K::store_elements(query, x, size);
  }
  float* value = x + pages.kv_heads * size;
  uint8_t* row = pages.page(place.page_id) + place.offset * row_bytes;
  for (int64_t head = 0; head < pages.kv_heads; ++head, x += size, value += size) {
    if (place.key_norm) scale_row<L>(x, place.key_norm, size, x);
    rotate(x, place.rotation);
    store_vector<K>(pages.element, x, size, row + head * pages.head_bytes());
    store_vector<K>(pages.element, value, size,
                    row + head * pages.head_bytes() + pages.value_offset_bytes());
  }
}

// One output's weights out of quantised panels.
template <class K>
void unpack_row(const kvell::Matrix& matrix, int64_t id, int64_t size, float* h) {
  constexpr int64_t kPer = kPerItem<K>, kItems = kvell::kPanel * kPer;
  const bool int4 = matrix.form == kvell::Form::int4;
  const uint8_t* group = matrix.panel(id / kvell::kPanel);
  const int64_t lane = id % kvell::kPanel;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t step = i % kvell::kGroup / kPer, number = lane * kPer + i % kPer;
    const uint8_t* quants = group + kvell::scales_bytes(matrix.form);
    const float scale = half_at(group + lane * 2);
    if (int4) {
      uint16_t bits;
      std::memcpy(&bits, quants + (step / 4 * kItems + number) * 2, 2);
      h[i] = scale * float(bits >> step % 4 * 4 & 15) + half_at(group + (kvell::kPanel + lane) * 2);
    } else {
      h[i] = scale * float(int8_t(quants[step * kItems + number]));
    }
    if ((i + 1) % kvell::kGroup == 0) group += kvell::group_bytes(matrix.form);
  }
}

template <class K>
void embed_row(const kvell::Embedding& embedding, int64_t id, float* h) {
  constexpr int64_t kPer = kPerItem<K>;
  const int64_t items = embedding.size / kPer;
  const uint8_t* item = embedding.table;
  int64_t stride = 4;
  if (embedding.packed && embedding.packed->form != kvell::Form::plain) {
    unpack_row<K>(*embedding.packed, id, embedding.size, h);
    for (int64_t i = 0; i < embedding.size; ++i) h[i] *= embedding.scale;
    return;
  }
  if (embedding.packed) {
    item = embedding.packed->panel(id / kvell::kPanel) + id % kvell::kPanel * 4;
    stride = kvell::kStepBytes;
  } else {
    item += id * items * 4;
  }
  for (int64_t i = 0; i < items; ++i, item += stride) {
    typename K::Element elements[kPer];
    std::memcpy(elements, item, 4);
    for (int64_t j = 0; j < kPer; ++j) h[i * kPer + j] = K::value(elements[j]) * embedding.scale;
  }
}

}  // namespace
