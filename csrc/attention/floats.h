// Kernel whose item is one float: any pool element, converted as it is packed.
#pragma once
#include "tile.h"

namespace {

struct Float32 {
  using Stored = float;
  static constexpr bool kScaled = false;
  KVELL_INLINE float read(const float* p) { return *p; }
};

struct BFloat16 {
  using Stored = uint16_t;
  static constexpr bool kScaled = false;
  KVELL_INLINE float read(const uint16_t* p) { return bf16_value(*p); }
};

struct Int8 {
  using Stored = int8_t;
  static constexpr bool kScaled = true;
  KVELL_INLINE float read(const int8_t* p) { return *p; }
};

// Sign, four bits of exponent (bias 7), three of mantissa; e4m3fn without its NaN, which is
// never stored.
struct Float8 {
  using Stored = uint8_t;
  static constexpr bool kScaled = true;
  static constexpr float kRebias = 0x1p120f;  // from a float's exponent bias to this one's
  KVELL_INLINE float read(const uint8_t* p) {
    const uint32_t bits = uint32_t(*p & 0x80) << 24 | uint32_t(*p & 0x7f) << 20;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x * kRebias;
  }
};

// What a row's numbers are multiplied by: the float behind its vector, if it has one.
template <class Pool>
KVELL_INLINE float scale_of(const uint8_t* row, int32_t head_size) {
  float scale = 1.0f;
  if (Pool::kScaled)
    __builtin_memcpy(&scale, row + head_size * sizeof(typename Pool::Stored), sizeof(scale));
  return scale;
}

template <class Pool>
static void copy_row(float* to, const void* data, int64_t at, int32_t size) {
  const auto* row = static_cast<const typename Pool::Stored*>(data) + at;
  for (int32_t d = 0; d < size; ++d) to[d] = Pool::read(row + d);
}

template <class LanesOf, class Pool, int Rows, int Columns>
struct FloatKernel : PlainRooms<LanesOf, 1> {
  using Lanes = LanesOf;
  using Item = float;
  using Items = typename Lanes::Vec;
  using Stored = typename Pool::Stored;
  static constexpr int kPerItem = 1, kRows = Rows, kColumns = Columns;
  static constexpr int kChains = 1, kPageRows = 0;

  KVELL_INLINE Items load(const float* p) { return Lanes::load(p); }
  KVELL_INLINE Items broadcast(const float* p) { return Lanes::set(*p); }
  KVELL_INLINE Items multiply_add(Items acc, Items a, Items b) { return Lanes::madd(a, b, acc); }

  template <class Scratch>
  static void pack_keys(const Scratch& lay, SpanRows rows, Stream& next) {
    for (int i = 0; i < kvell::kSpan; ++i) {
      next.advance(lines<Stored>(lay.head_size));
      const Stored* row = reinterpret_cast<const Stored*>(rows[i]);
      const float scale = scale_of<Pool>(rows[i], lay.head_size);
      float* to = lay.keys + i;
      for (int32_t d = 0; d < lay.head_size; ++d, to += kvell::kSpan)
        *to = Pool::read(row + d) * scale;
    }
  }

  template <class Scratch>
  static void pack_values(const Scratch& lay, SpanRows rows, Stream& next) {
    for (int i = 0; i < kvell::kSpan; ++i) {
      next.advance(lines<Stored>(lay.value_size));
      const Stored* row = reinterpret_cast<const Stored*>(rows[i]);
      const float scale = scale_of<Pool>(rows[i], lay.head_size);
      float* to = lay.values + int64_t(i) * lay.padded_size;
      for (int32_t d = 0; d < lay.value_size; ++d) to[d] = Pool::read(row + d) * scale;
      for (int32_t d = lay.value_size; d < lay.padded_size; ++d) to[d] = 0.0f;
    }
  }

  template <class Scratch>
  static void pack_query(const kvell::Call& call, const kvell::Task& task, const Scratch& lay) {
    float* to = lay.query;
    const int32_t group = call.group_heads();
    for (int32_t head = task.head_begin; head < task.head_end; ++head)
      for (int32_t token = task.token_begin; token < task.token_end; ++token)
        for (int32_t g = 0; g < group; ++g, to += lay.head_size) {
          const int64_t at =
              token * call.query.token_stride + (head * group + g) * call.query.head_stride;
          if (call.query.element == kvell::Element::float32)
            copy_row<Float32>(to, call.query.data, at, lay.head_size);
          else
            copy_row<BFloat16>(to, call.query.data, at, lay.head_size);
        }
  }

  template <class Element>
  KVELL_INLINE int lines(int32_t elements) {
    return static_cast<int>((elements * sizeof(Element) + 63) / 64);
  }

  // `counted`: which positions of the span each row reads. Updates maxima [R] and lanes of sums
  // [R, lanes]; factor[row] is by what a row's sums so far had to shrink.
  template <int R>
  KVELL_INLINE void weigh_rows(float (*scores)[kvell::kSpan], const kvell::Range* counted,
                               const kvell::Rule& rule, float* maximum, float* sums,
                               float (*weights)[kvell::kSpan], float* factor) {
    for (int r = 0; r < R; ++r) {
      factor[r] = weigh<Lanes>(scores[r], counted[r].begin, counted[r].end, rule, maximum[r]);
      float* lanes = sums + r * Lanes::kWidth;
      auto sum = Lanes::madd(Lanes::load(lanes), Lanes::set(factor[r]), Lanes::zero());
      for (int i = 0; i < kvell::kSpan; i += Lanes::kWidth) {
        const auto w = Lanes::load(scores[r] + i);
        Lanes::store(weights[r] + i, w);
        sum = Lanes::madd(w, Lanes::set(1.0f), sum);
      }
      Lanes::store(lanes, sum);
    }
  }
};

// A task over whatever its pool holds, by the kernel for it.
template <template <class Pool> class Kernel>
void run_over_pool(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  switch (call.layer.element) {
    case kvell::Element::float32: return run_tile<Kernel<Float32>>(call, task, scratch);
    case kvell::Element::bfloat16: return run_tile<Kernel<BFloat16>>(call, task, scratch);
    case kvell::Element::int8: return run_tile<Kernel<Int8>>(call, task, scratch);
    case kvell::Element::float8: return run_tile<Kernel<Float8>>(call, task, scratch);
  }
}

}  // namespace
