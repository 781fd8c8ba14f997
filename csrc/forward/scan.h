// What a mixer computes of one request: its convolution, and the recurrence of a head.
//
// Both go token by token, so a token's bits depend on the request's own tokens alone; states
// are float32 inside a step, and rounded only where pages keep 16 bits. Inputs of a convolution
// are rounded as their window is before anything is made of them, in whichever step that is.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "finish.h"
#include "kernels.h"
#include "store.h"
#if defined(__AVX512F__)
#include "sums_avx512.h"
#endif

namespace {

using kvell::Element;
using kvell::Stop;
using kvell::Track;

constexpr int64_t kConvolved = 64;  // channels at a time
constexpr int64_t kScanned = 16;    // tokens at a time, whose B and C stay in the first cache

template <class K>
void load_numbers(Element element, const uint8_t* from, int64_t count, float* to) {
  if (element == Element::float32) {
    std::memcpy(to, from, count * 4);
    return;
  }
  const auto* numbers = reinterpret_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < count; ++i) to[i] = bf16_value(numbers[i]);
}

template <class K>
void store_numbers(Element element, const float* x, int64_t count, uint8_t* to) {
  if (element == Element::float32)
    std::memcpy(to, x, count * 4);
  else
    K::store_bf16(reinterpret_cast<uint16_t*>(to), x, count);
}

// The last inputs of some channels, oldest first from place `oldest` on, going round.
struct Ring {
  alignas(64) float places[kvell::kMostWindow + 1][kConvolved];
  int64_t size;

  float* at(int64_t place) { return places[place % size]; }
};

// Pages hold [channels, window].
template <class K>
void load_window(const kvell::Convolution& made, int64_t channel, int64_t count, Ring& ring) {
  const int64_t window = made.shape->window;
  for (int64_t place = 0; place < window; ++place) std::memset(ring.at(place), 0, kConvolved * 4);
  if (!made.track->pages) return;
  float numbers[kvell::kMostWindow * kConvolved];
  load_numbers<K>(made.rows.element, made.rows.at(made.track->pages[made.part], channel * window),
                  count * window, numbers);
  for (int64_t place = 0; place < window; ++place)
    for (int64_t i = 0; i < count; ++i) ring.at(place)[i] = numbers[i * window + place];
}

template <class K>
void store_window(const kvell::Convolution& made, const Stop& stop, int64_t channel, int64_t count,
                  Ring& ring) {
  const int64_t window = made.shape->window;
  if (stop.pages[made.part] < 0) return;
  float numbers[kvell::kMostWindow * kConvolved];
  for (int64_t place = 0; place < window; ++place)
    for (int64_t i = 0; i < count; ++i) numbers[i * window + place] = ring.at(stop.tokens + place)[i];
  store_numbers<K>(made.rows.element, numbers, count * window,
                   made.rows.at(stop.pages[made.part], channel * window));
}

// A token's inputs as pages would hold them.
template <class K>
void take_inputs(Element element, const float* inputs, int64_t count, float* to) {
  std::memset(to + count, 0, (kConvolved - count) * 4);
  if (element == Element::float32) {
    std::memcpy(to, inputs, count * 4);
    return;
  }
  uint16_t rounded[kConvolved];
  K::store_bf16(rounded, inputs, count);
  for (int64_t i = 0; i < count; ++i) to[i] = bf16_value(rounded[i]);
}

template <class L>
void convolve_token(const kvell::Convolution& made, int64_t token, int64_t channel, int64_t lanes,
                    Ring& ring) {
  const int64_t stride = made.shape->mixed();
  float* output = made.outputs + token * stride + channel;
  for (int64_t i = 0; i < lanes; i += L::kWidth) {
    auto sum = L::load(made.bias + channel + i);
    for (int64_t place = 0; place < ring.size; ++place)
      sum = L::madd(L::load(ring.at(token + place) + i),
                    L::load(made.weight + place * stride + channel + i), sum);
    L::store(output + i, silu_of<L>(sum));
  }
}

// Channels [channel_begin, channel_end) of a request; both are multiples of kConvolved, or the end.
template <class K>
void convolve(const kvell::Convolution& made) {
  const Track& track = *made.track;
  for (int64_t channel = made.channel_begin; channel < made.channel_end; channel += kConvolved) {
    const int64_t count = std::min(kConvolved, made.channel_end - channel);
    const int64_t lanes = std::min(kConvolved, made.shape->mixed() - channel);
    Ring ring;
    ring.size = made.shape->window + 1;
    load_window<K>(made, channel, count, ring);
    const Stop* stop = track.stops;
    for (int64_t token = 0; token < track.tokens; ++token) {
      take_inputs<K>(made.rows.element, made.inputs + token * made.inputs_stride + channel, count,
                     ring.at(token + made.shape->window));
      convolve_token<typename K::Lanes>(made, token, channel, lanes, ring);
      for (; stop != track.stops_end && stop->tokens == token + 1; ++stop)
        store_window<K>(made, *stop, channel, count, ring);
    }
  }
}

// ln(1 + eˣ), as torch has it.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Tokens [begin, end) of a head, and what they do to its state.
struct Piece {
  int64_t begin, end;
  float steps[kScanned], decays[kScanned];

  Piece(const kvell::Scan& scan, int64_t first, int64_t last) : begin(first), end(last) {
    const kvell::Mixer& mixer = *scan.mixer;
    for (int64_t i = 0; i < end - begin; ++i) {
      const float raw = scan.steps[(begin + i) * scan.steps_stride] + mixer.step_bias[scan.head];
      steps[i] = std::min(std::max(softplus(raw), mixer.least_step), mixer.most_step);
      decays[i] = std::exp(steps[i] * mixer.decays[scan.head]);
    }
  }
};

template <class L, int R>
KVELL_INLINE void sums_of(const typename L::Vec (&sums)[R], float* to) {
#if defined(__AVX512F__)
  if constexpr (R == 8) return sums_of_eight(sums, to);
#endif
  for (int r = 0; r < R; ++r) to[r] = L::sum(sums[r]);
}

// Numbers of the state beyond whole registers.
template <int R>
void advance_rest(const float* added, float decay, const float* write, const float* read,
                  int64_t begin, int64_t size, float* state, float* y) {
  for (int r = 0; r < R; ++r)
    for (int64_t i = begin; i < size; ++i) {
      float& now = state[r * size + i];
      now = now * decay + added[r] * write[i];
      y[r] += now * read[i];
    }
}

// R rows of the state through a piece; each row's number of x becomes its number of y.
template <class L, int R>
void advance_rows(const kvell::Scan& scan, const Piece& piece, int64_t row, float* state) {
  const kvell::MixerShape& shape = *scan.shape;
  const int64_t size = shape.state_size, whole = size - size % L::kWidth, stride = shape.mixed();
  const int64_t group = scan.head / (shape.heads / shape.groups);
  const float skip = scan.mixer->skips[scan.head];
  for (int64_t token = piece.begin; token < piece.end; ++token) {
    float* mixed = scan.mixed + token * stride;
    float* x = mixed + scan.head * shape.head_size + row;
    const float *write = mixed + shape.inner() + group * size, *read = write + shape.written();
    const float step = piece.steps[token - piece.begin], decay = piece.decays[token - piece.begin];
    const auto decays = L::set(decay);
    float added[R], y[R];
    typename L::Vec all[R], sums[R];
    for (int r = 0; r < R; ++r) added[r] = step * x[r];
    for (int r = 0; r < R; ++r) all[r] = L::set(added[r]), sums[r] = L::zero();
    for (int64_t i = 0; i < whole; i += L::kWidth) {
      const auto writes = L::load(write + i), reads = L::load(read + i);
      for (int r = 0; r < R; ++r) {
        float* at = state + r * size + i;
        const auto now = L::madd(L::load(at), decays, times<L>(all[r], writes));
        L::store(at, now);
        sums[r] = L::madd(now, reads, sums[r]);
      }
    }
    sums_of<L, R>(sums, y);
    if (whole < size) advance_rest<R>(added, decay, write, read, whole, size, state, y);
    for (int r = 0; r < R; ++r) x[r] = y[r] + skip * x[r];
  }
}

template <class K, int R>
void scan_rows(const kvell::Scan& scan, const Piece& piece, int64_t row, float* state,
               const Stop* stop, const Stop* stops_end) {
  const int64_t size = scan.shape->state_size;
  const int64_t number = (scan.head * scan.shape->head_size + row) * size;
  if (piece.begin == 0 && scan.track->pages)
    load_numbers<K>(scan.rows.element, scan.rows.at(scan.track->pages[scan.part], number), R * size,
                    state);
  else if (piece.begin == 0)
    std::memset(state, 0, R * size * 4);
  advance_rows<typename K::Lanes, R>(scan, piece, row, state);
  for (; stop != stops_end; ++stop)
    if (stop->pages[scan.part] >= 0)
      store_numbers<K>(scan.rows.element, state, R * size,
                       scan.rows.at(stop->pages[scan.part], number));
}

// One head of a request; its state is kept in `scan.state` from piece to piece.
template <class K>
void scan_head(const kvell::Scan& scan) {
  constexpr int kRows = K::Lanes::kWidth == 16 ? 8 : 4;  // in registers, with their sums
  const Track& track = *scan.track;
  const int64_t rows = scan.shape->head_size, size = scan.shape->state_size;
  const Stop* stop = track.stops;
  for (int64_t begin = 0; begin < track.tokens;) {
    const int64_t end = std::min(begin + kScanned, stop->tokens);
    const Piece piece(scan, begin, end);
    const Stop* after = stop;
    while (after != track.stops_end && after->tokens == end) ++after;
    const bool alone = end - begin == track.tokens;  // no later piece goes on from its state
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows)
      scan_rows<K, kRows>(scan, piece, row, scan.state + (alone ? 0 : row * size), stop, after);
    for (; row < rows; ++row)
      scan_rows<K, 1>(scan, piece, row, scan.state + (alone ? 0 : row * size), stop, after);
    begin = end;
    stop = after;
  }
}

}  // namespace
