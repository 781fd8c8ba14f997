// What an instruction set computes of a forward pass. Threads call these on shares of rows
// and panels; no share changes a bit of a result.
#pragma once
#include "matrix.h"

namespace kvell {

// Rotations of one token: cosines, then sines, `half` of each.
struct Rotation {
  const float* cosines;
  int64_t half;  // 0: the layer has no positions
};

// One token's queries, keys and values, as they come out of the projection, and where they go.
struct Placement {
  float* qkv;  // [(heads + 2 kv_heads) · head_size], changed on the way
  int64_t heads;
  Norm query_norm, key_norm;
  Rotation rotation;
  void* query;  // [heads · head_size] elements
  const Layer* pages;
  int32_t page_id, offset;
};

// A table's row as float32, times scale: from a plain one, or out of a packed matrix.
struct Embedding {
  const uint8_t* table;
  const Matrix* packed;  // or null
  int64_t vocab, size;
  float scale;
};

struct Kernels {
  const char* name;
  Element element;
  // Panels [panel_begin, panel_end) of rows [row_begin, row_end); `next` is where the stream
  // of weights goes on afterwards, or null.
  void (*product)(const Product&, Activation, int64_t panel_begin, int64_t panel_end,
                  int64_t row_begin, int64_t row_end, const uint8_t* next);
  // One row of `size`: h += factor · norm(branch), if there is a branch; then x = norm(h).
  void (*norm)(float* h, const float* branch, Norm branch_norm, float factor, Norm norm, void* x,
               int64_t size);
  void (*place)(const Placement&);
  void (*embed)(const Embedding&, int64_t id, float* h);
};

// Best first; null past the end. By name: null if this processor or build has none of it.
const Kernels* kernels_at(int index, Element element);
const Kernels* kernels_named(const char* name, Element element);

const Kernels* avx512_forward(Element element);
const Kernels* avx2_forward(Element element);
const Kernels* portable_forward(Element element);

}  // namespace kvell
