// What an instruction set computes of a forward pass. Threads call these on shares of rows
// and panels; no share changes a bit of a result.
#pragma once
#include "matrix.h"
#include "mixer.h"

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

// Some channels of one request, convolved over its tokens; its windows are stored at its stops.
struct Convolution {
  const MixerShape* shape;
  const float *weight, *bias;  // [window + 1, mixed], [mixed]
  const float* inputs;         // of its first token, which others follow
  int64_t inputs_stride;
  float* outputs;  // [tokens, mixed]
  const Track* track;
  StateRows rows;
  int32_t part;
  int64_t channel_begin, channel_end;
};

// One head of one request, through all its tokens; x becomes y where it lies.
struct Scan {
  const MixerShape* shape;
  const Mixer* mixer;
  int64_t head;
  float* mixed;        // [tokens, mixed]: x, B and C, convolved
  const float* steps;  // the head's number of its first token
  int64_t steps_stride;
  const Track* track;
  StateRows rows;
  int32_t part;
  float* state;  // [head_size, state_size], to compute in
};

// One token's y and gates [size]; what they make, as elements.
struct Gated {
  const float *y, *gates;
  int64_t size, groups;
  Norm norm;
  bool norm_before_gate;
  void* to;
};

// How quickly plain weights are multiplied, and so how products are cut.
struct Pace {
  int64_t pass_rows;          // that kernels take at a time
  int64_t reading_rows;       // of x, at most, where reading weights takes longest
  int64_t shared_rows_bytes;  // of x, at most, in one share: part of a second cache
};

struct Kernels {
  const char* name;
  Element element;
  Pace pace;
  // Panels [panel_begin, panel_end) of rows [row_begin, row_end). `again`: this thread's last call
  // was for the same rows of the same product, so what it made of them is still good. `next` is
  // where the stream of weights goes on afterwards, or null.
  void (*product)(const Product&, Activation, int64_t panel_begin, int64_t panel_end,
                  int64_t row_begin, int64_t row_end, bool again, const uint8_t* next);
  // One row of `size`: h += factor · norm(branch), if there is a branch; then x = norm(h).
  void (*norm)(float* h, const float* branch, Norm branch_norm, float factor, Norm norm, void* x,
               int64_t size);
  void (*place)(const Placement&);
  void (*embed)(const Embedding&, int64_t id, float* h);
  void (*convolve)(const Convolution&);
  void (*scan)(const Scan&);
  void (*gate)(const Gated&);
};

// Best first; null past the end. By name: null if this processor or build has none of it.
const Kernels* kernels_at(int index, Element element);
const Kernels* kernels_named(const char* name, Element element);

const Kernels* amx_forward(Element element);
const Kernels* avx512_forward(Element element);
const Kernels* avx512f_forward(Element element);
const Kernels* avx2_forward(Element element);
const Kernels* portable_forward(Element element);

}  // namespace kvell
