// A state mixer of one decay per head (Mamba 2: Dao and Gu 2024, §7) beside a layer's attention,
// and where a step's states lie (models/states/state_pages.py, attention/states.py).
//
//   projected: gates | x, B, C | step sizes
//   x, B, C ─► convolution over each request's own tokens ─► silu
//   state [head_size, state_size] of a head ─► state · decay + step · x Bᵀ,   y = state C + skip · x
//   y and gates ─► norm ─► out
#pragma once
#include <vector>

#include "matrix.h"

namespace kvell {

constexpr int64_t kMostWindow = 7;
constexpr int64_t kLanesOfRow = 16;  // rows of what is convolved are filled up to whole lanes

// Sizes that all mixers of a model share.
struct MixerShape {
  int64_t heads, head_size, groups, state_size;
  int64_t window;  // earlier inputs that the convolution reads

  int64_t inner() const { return heads * head_size; }
  int64_t written() const { return groups * state_size; }
  int64_t channels() const { return inner() + 2 * written(); }
  int64_t projected() const { return inner() + channels() + heads; }
  int64_t mixed() const { return (channels() + kLanesOfRow - 1) / kLanesOfRow * kLanesOfRow; }
  int64_t state_numbers() const { return head_size * state_size; }
};

// Numbers of a kind, one row for each page.
struct StateRows {
  uint8_t* first;
  int64_t stride_bytes;
  Element element;  // float32 or bfloat16

  uint8_t* at(int64_t page, int64_t number) const {
    return first + page * stride_bytes + number * element_bytes(element);
  }
};

// A layer's states: of a request's `slices` pages the layer is in number `part`.
struct StatePages {
  StateRows window;     // [channels, window]
  StateRows recurrent;  // [heads, head_size, state_size]
  int64_t pages;
  int32_t part, group;
};

// A layer's constants; without a convolution it has no mixer.
struct Mixer {
  const float* convolution;  // [window + 1, mixed], the last place for the token itself
  const float* convolution_bias;  // [mixed]
  const float *step_bias, *decays, *skips;  // [heads]; decays: negative
  float least_step, most_step;
  Norm norm;  // of each group of heads apart, or none
  bool norm_before_gate;
  Matrix out;
  float out_factor;
  StatePages pages;  // set by attach

  explicit operator bool() const { return convolution != nullptr; }
};

// One group's metadata for a ragged batch (StateBatch).
struct StateBatch {
  int32_t requests, cuts, slices;
  const int32_t *query_starts, *starts, *page_ids;
  const int32_t *cut_requests, *cut_tokens, *cut_page_ids;
  const int32_t* end_page_ids;  // or null: states go on where they are

  int64_t new_tokens(int64_t request) const {
    return query_starts[request + 1] - query_starts[request];
  }
};

// A state is stored after so many of a request's new tokens, in its layer's page of these.
struct Stop {
  int64_t tokens;
  const int32_t* pages;
};

// One request's new tokens; its last stop is behind the last of them.
struct Track {
  int64_t row, tokens;
  const int32_t* pages;  // null: no state yet
  const Stop *stops, *stops_end;
};

// A group's requests in one step.
struct Tracks {
  explicit Tracks(const StateBatch& batch);

  std::vector<Stop> stops;
  std::vector<Track> tracks;
};

}  // namespace kvell
