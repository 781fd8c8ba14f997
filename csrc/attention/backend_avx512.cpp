// AVX-512 with bf16 dot products.
#include "backend.h"
#include "pairs_avx512.h"

#include "floats.h"

namespace {

// Floats in 16 lanes; keys are transposed in registers.
struct Float16Kernel : FloatKernel<Avx512Lanes, Float32, 6, 4> {
  static void pack_keys(const Lay<Float16Kernel>& lay, SpanRows rows, Stream& next) {
    transpose_span(lay.keys, lay.query_items, rows, next);
  }

  static constexpr bool kReadsPages = true;
  KVELL_INLINE __m512 items_of(__m512i x) { return _mm512_castsi512_ps(x); }

  template <int R>
  KVELL_INLINE void scores_from_pages(const Lay<Float16Kernel>& lay, int32_t row, SpanRows keys,
                                      Stream& next, float (*scores)[kvell::kSpan]) {
    transposed_scores<Float16Kernel, R>(lay, row, keys, next, scores);
  }

  template <int R, int C>
  KVELL_INLINE void add_from_pages(__m512 (&acc)[R][C], const float* weights, SpanRows values,
                                   int32_t column, int32_t left, int32_t depth, Stream& next) {
    for (int32_t k = 0; k < depth; ++k) {
      const uint8_t* row = values[k];
      next.advance(C);
      for (int c = 0; c < C; ++c) {
        const __mmask16 mask = Avx512Lanes::lanes(0, left - c * 16);
        const __m512 items = _mm512_castsi512_ps(load_items(row, column + c * 16, mask));
        for (int r = 0; r < R; ++r)
          acc[r][c] = multiply_add(acc[r][c], broadcast(weights + r * kvell::kSpan + k), items);
      }
    }
  }
};

bool is_float32(const kvell::Call& call) {
  return call.layer.element == kvell::Element::float32;
}

size_t scratch_bytes(const kvell::Call& call, int32_t max_rows) {
  return Lay<Float16Kernel>::bytes(call, max_rows);  // the larger of the two
}

void run(const kvell::Call& call, const kvell::Task& task, void* scratch) {
  is_float32(call) ? run_tile<Float16Kernel>(call, task, scratch)
                   : run_tile<PairKernel>(call, task, scratch);
}

void fold(const kvell::Call& call, const kvell::Fold& sections, void* scratch) {
  fold_tile<PairKernel>(call, sections, scratch);
}

}  // namespace

const kvell::Backend* kvell::avx512_backend() {
  static const Backend backend{"avx512", scratch_bytes, run, ::fold};
  return &backend;
}
