// One step through all layers, in phases of a team of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "cut.h"
#include "largest.h"
#include "model.h"
#include "scratch.h"
#include "team.h"

namespace kvell {
namespace {

constexpr int64_t kFewRows = 4;               // of norms and the like, in one share
constexpr int64_t kShareChannels = 256;       // of a request's convolution, in one share

// Of a decoder's own shape, without pages or requests: what its sizes follow from.
Call bare_call(const Decoder& decoder) {
  Call call{};
  call.layer.kv_heads = int32_t(decoder.kv_heads);
  call.layer.head_size = int32_t(decoder.head_size);
  call.query.heads = int32_t(decoder.heads);
  return call;
}

int64_t slice_bytes(const Decoder& decoder) {
  const Call call = bare_call(decoder);
  const int64_t attention_bytes = decoder.attention->scratch_bytes(call, most_task_rows(call));
  return std::max(attention_bytes, 4 * decoder.mixer.state_numbers());
}

class Pass {
 public:
  Pass(const Decoder& decoder, const Step& step, SeamHook* hook, int threads)
      : decoder_(decoder),
        step_(step),
        hook_(hook),
        work_(decoder, step.tokens, step.rows, step.workspace),
        plans_(decoder.layers.size()),
        scratch_(step.scratch, step.scratch_bytes, slice_bytes(decoder), threads) {
    if (step.away) begin_away();
    if (!scratch_.fits()) throw std::invalid_argument("scratch: too small for so many threads");
    for (size_t index = 0; index < decoder.layers.size(); ++index) {
      const DecoderLayer& layer = decoder.layers[index];
      plan_of_.push_back(first_alike(index));
      if (plan_of_[index] == index) plans_[index] = plan_for(layer, threads);
    }
    for (const StateBatch& batch : step.states) tracks_.emplace_back(batch);
  }

  int64_t used_bytes() const { return work_.bytes + scratch_.used_bytes(); }

  void run(Team& team, int self) {
    begin(team, self);
    const int layers = static_cast<int>(decoder_.layers.size());
    for (int index = 0; index < layers; ++index) {
      const DecoderLayer& layer = decoder_.layers[index];
      const bool last = index + 1 == layers;
      before(team, self, layer);
      if (!seam(team, self, Seam::before_attend, index)) return;
      attend(team, self, index);
      if (!seam(team, self, Seam::after_attend, index)) return;
      const Rows rows = last ? wanted_rows(team, self) : all_rows();
      if (rows.count == 0) return;
      after(team, self, layer, rows, last ? nullptr : &decoder_.layers[index + 1]);
    }
    head(team, self);
  }

  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  // The rows that a layer's second half computes.
  struct Rows {
    int64_t count;
    float* stream;
    void *attended, *gated;
    const int64_t* tokens;  // which they are; null: all, in order
  };

  Rows all_rows() const {
    return {step_.tokens, work_.stream, work_.attended, work_.gated, nullptr};
  }

  template <class Body>
  void each_row(Team& team, int self, int64_t rows, Body body) {
    team.each(self, up(rows, kFewRows), [&](int64_t share) {
      for (int64_t row = share * kFewRows; row < std::min(rows, (share + 1) * kFewRows); ++row)
        body(row);
    });
  }

  uint8_t* elements(void* base, int64_t row, int64_t size) const {
    return static_cast<uint8_t*>(base) + row * size * decoder_.element_size();
  }

  // Embeddings, the first norm, and rotations by position.
  void begin(Team& team, int self) {
    each_row(team, self, step_.tokens, [&](int64_t row) {
      float* h = work_.stream + row * decoder_.hidden;
      decoder_.kernels->embed(decoder_.embedding, step_.ids[row], h);
      norm(row, work_.stream, nullptr, {}, 1.0f, decoder_.layers[0].before_attention);
      float* to = work_.rotations + row * rotated();
      for (const Rope& rope : decoder_.ropes) to = rotate(rope, step_.positions[row], to);
    });
  }

  int64_t rotated() const {
    int64_t numbers = 0;
    for (const Rope& rope : decoder_.ropes) numbers += 2 * int64_t(rope.frequencies.size());
    return numbers;
  }

  static float* rotate(const Rope& rope, int64_t position, float* to) {
    const int64_t half = rope.frequencies.size();
    for (int64_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * rope.frequencies[i];
      to[i] = std::cos(angle) * rope.factor;
      to[half + i] = std::sin(angle) * rope.factor;
    }
    return to + 2 * half;
  }

  Rotation rotation(int64_t row, int rope) const {
    if (rope < 0) return {nullptr, 0};
    const float* at = work_.rotations + row * rotated();
    for (int i = 0; i < rope; ++i) at += 2 * decoder_.ropes[i].frequencies.size();
    return {at, int64_t(decoder_.ropes[rope].frequencies.size())};
  }

  void norm(int64_t row, float* stream, const float* branch, Norm branch_norm, float factor,
            Norm norm) const {
    const int64_t hidden = decoder_.hidden;
    decoder_.kernels->norm(stream + row * hidden, branch ? branch + row * hidden : nullptr,
                           branch_norm, factor, norm,
                           elements(work_.normed, row, hidden), hidden);
  }

  // Projections, then queries aside and keys and values into their pages.
  void before(Team& team, int self, const DecoderLayer& layer) {
    product(team, self,
            {&layer.qkv, items(work_.normed), decoder_.items(decoder_.hidden), step_.tokens,
             {Goal::store, work_.projected, decoder_.projected()}},
            layer.mixer ? &layer.mixer.out : &layer.out);
    const GroupStep& group = step_.groups[layer.group];
    each_row(team, self, step_.tokens, [&](int64_t row) {
      decoder_.kernels->place({work_.projected + row * decoder_.projected(), decoder_.heads,
                               layer.query_norm, layer.key_norm, rotation(row, layer.rope),
                               elements(work_.query, row, decoder_.heads * decoder_.head_size),
                               &layer.pages, group.write_page_ids[row], group.write_offsets[row]});
    });
  }

  Call call_of(const DecoderLayer& layer) const {
    const int64_t size = decoder_.head_size;
    const Element element = decoder_.kernels->element;
    return {layer.pages,
            step_.groups[layer.group].batch,
            {work_.query, element, decoder_.heads * size, size, int32_t(decoder_.heads)},
            layer.rule,
            {work_.attended, element, nullptr, nullptr}};
  }

  // Whether others hold sections of a layer's contexts.
  bool asks(const DecoderLayer& layer) const { return step_.away && step_.away->reads(layer.group); }

  void begin_away() const {
    std::vector<AwayGroup> groups;
    for (const GroupStep& group : step_.groups) groups.push_back({group.batch, 0, true});
    for (const DecoderLayer& layer : decoder_.layers) {
      AwayGroup& group = groups[layer.group];
      group.page_tokens = layer.pages.page_tokens;
      group.is_full &= layer.rule.window_tokens == 0 && layer.rule.chunk_tokens == 0;
    }
    step_.away->begin(groups);
    step_.away->fit(row_shape());
  }

  RowShape row_shape() const {
    const int32_t size = int32_t(decoder_.head_size);
    return {int32_t(decoder_.heads), size, size, decoder_.kernels->element};
  }

  AwayLayer away_layer(int index) const {
    const DecoderLayer& layer = decoder_.layers[index];
    return {index, layer.group, row_shape(), layer.rule.scale, layer.rule.softcap, work_.query};
  }

  Plan plan_for(const DecoderLayer& layer, int threads) {
    Call call = call_of(layer);
    if (!asks(layer)) return make_plan_in(scratch_.records, call, threads);
    call.elsewhere = step_.away->records(0, layer.group);
    return make_plan_apart(scratch_.records, step_.away->space(), call, threads);
  }

  // The first layer that reads the same positions of the same pages: their plan is one.
  size_t first_alike(size_t index) const {
    const std::vector<DecoderLayer>& layers = decoder_.layers;
    size_t first = 0;
    while (layers[first].group != layers[index].group ||
           !layers[first].rule.reads_like(layers[index].rule))
      ++first;
    return first;
  }

  void attend(Team& team, int self, int index) {
    const DecoderLayer& layer = decoder_.layers[index];
    const Call call = call_of(layer);
    const Plan& plan = plans_[plan_of_[index]];
    const int64_t tasks = plan.tasks.size(), folds = plan.folds.size();
    // The queries leave first, and the caller's own thread waits for what comes back: share 0 is its own.
    const int64_t ask = asks(layer) ? 1 : 0;
    team.each(self, ask + tasks + convolutions(layer), [&](int64_t share) {
      if (share < ask) return step_.away->post(away_layer(index));
      share -= ask;
      if (share >= tasks) return convolve(layer, share - tasks);
      decoder_.attention->run(call, plan.tasks[share], scratch_.of(self));
    }, ask);
    const int64_t heads = scans(layer);
    if (ask + heads + folds == 0) return;
    team.each(self, ask + heads + folds, [&](int64_t share) {
      if (share < ask) return step_.away->wait(away_layer(index));
      share -= ask;
      if (share < heads) return scan(layer, share, scratch_.of(self));
      decoder_.attention->fold(call, plan.folds[share - heads], scratch_.of(self));
    }, ask);
    if (ask) begin_elsewhere(team, self, index, plan);
  }

  // Requests whose first sections others hold: those come first.
  void begin_elsewhere(Team& team, int self, int index, const Plan& plan) {
    const DecoderLayer& layer = decoder_.layers[index];
    Call call = call_of(layer);
    call.elsewhere = step_.away->records(index, layer.group);
    const int64_t folds = plan.later_folds.size();
    team.each(self, folds + int64_t(plan.later.size()), [&](int64_t share) {
      if (share < folds)
        decoder_.attention->fold(call, plan.later_folds[share], scratch_.of(self));
      else
        decoder_.attention->run(call, plan.later[share - folds], scratch_.of(self));
    });
  }

  int64_t channel_shares() const { return up(decoder_.mixer.channels(), kShareChannels); }

  int64_t convolutions(const DecoderLayer& layer) const {
    return layer.mixer ? tracks_[layer.mixer.pages.group].tracks.size() * channel_shares() : 0;
  }

  int64_t scans(const DecoderLayer& layer) const {
    return layer.mixer ? tracks_[layer.mixer.pages.group].tracks.size() * decoder_.mixer.heads : 0;
  }

  // What a mixer reads of a token: its gates come first.
  float* mixer_input(int64_t row) const {
    return work_.projected + row * decoder_.projected() + decoder_.qkv_size();
  }

  void convolve(const DecoderLayer& layer, int64_t share) const {
    const Mixer& mixer = layer.mixer;
    const MixerShape& shape = decoder_.mixer;
    const Track& track = tracks_[mixer.pages.group].tracks[share / channel_shares()];
    const int64_t channel = share % channel_shares() * kShareChannels;
    decoder_.kernels->convolve({&shape, mixer.convolution, mixer.convolution_bias,
                                mixer_input(track.row) + shape.inner(), decoder_.projected(),
                                work_.mixed + track.row * shape.mixed(), &track, mixer.pages.window,
                                mixer.pages.part, channel,
                                std::min(channel + kShareChannels, shape.channels())});
  }

  void scan(const DecoderLayer& layer, int64_t share, void* state) const {
    const Mixer& mixer = layer.mixer;
    const MixerShape& shape = decoder_.mixer;
    const Track& track = tracks_[mixer.pages.group].tracks[share / shape.heads];
    const int64_t head = share % shape.heads;
    decoder_.kernels->scan({&shape, &mixer, head, work_.mixed + track.row * shape.mixed(),
                            mixer_input(track.row) + shape.inner() + shape.channels() + head,
                            decoder_.projected(), &track, mixer.pages.recurrent, mixer.pages.part,
                            static_cast<float*>(state)});
  }

  // Gates and output projection of a mixer.
  void mix(Team& team, int self, const DecoderLayer& layer, Rows rows) {
    const Mixer& mixer = layer.mixer;
    const MixerShape& shape = decoder_.mixer;
    each_row(team, self, rows.count, [&](int64_t row) {
      const int64_t token = rows.tokens ? rows.tokens[row] : row;
      decoder_.kernels->gate({work_.mixed + token * shape.mixed(), mixer_input(token), shape.inner(),
                              shape.groups, mixer.norm, mixer.norm_before_gate,
                              elements(rows.gated, row, shape.inner())});
    });
    product(team, self,
            {&mixer.out, items(rows.gated), decoder_.items(shape.inner()), rows.count,
             {Goal::add, rows.stream, decoder_.hidden, mixer.out_factor}},
            &layer.out);
  }

  // Output projection and MLP of some rows; then the norm that the next layer begins with.
  void after(Team& team, int self, const DecoderLayer& layer, Rows rows, const DecoderLayer* next) {
    if (layer.mixer) mix(team, self, layer, rows);
    branch(team, self,
           {&layer.out, items(rows.attended), decoder_.items(decoder_.heads * decoder_.head_size),
            rows.count, {}},
           rows, layer.out_factor, layer.after_attention, layer.before_mlp, &layer.gate_up);
    product(team, self,
            {&layer.gate_up, items(work_.normed), decoder_.items(decoder_.hidden), rows.count,
             {Goal::gate, work_.inner, decoder_.intermediate}},
            &layer.down);
    branch(team, self,
           {&layer.down, items(work_.inner), decoder_.items(decoder_.intermediate), rows.count, {}},
           rows, layer.down_factor, layer.after_mlp,
           next ? next->before_attention : decoder_.final_norm, next ? &next->qkv : &decoder_.head);
  }

  // A product that joins the stream, through a norm of its own if it has one; then `norm`.
  void branch(Team& team, int self, Product made, Rows rows, float factor, Norm own, Norm after,
              const Matrix* following) {
    if (own)
      made.finish = {Goal::store, work_.branch, decoder_.hidden};
    else
      made.finish = {Goal::add, rows.stream, decoder_.hidden, factor};
    product(team, self, made, following);
    each_row(team, self, rows.count, [&](int64_t row) {
      norm(row, rows.stream, own ? work_.branch : nullptr, own, factor, after);
    });
  }

  // In the last layer only rows with logits go on.
  Rows wanted_rows(Team& team, int self) {
    const int64_t hidden = decoder_.hidden, size = decoder_.heads * decoder_.head_size;
    each_row(team, self, step_.rows, [&](int64_t row) {
      const int64_t from = step_.logits_rows[row];
      std::memcpy(work_.rows_stream + row * hidden, work_.stream + from * hidden, hidden * 4);
      std::memcpy(elements(work_.rows_attended, row, size), elements(work_.attended, from, size),
                  size * decoder_.element_size());
    });
    return {step_.rows, work_.rows_stream, work_.rows_attended, work_.rows_gated,
            step_.logits_rows};
  }

  void head(Team& team, int self) {
    team.rest_no_more(self);
    product(team, self,
            {&decoder_.head, items(work_.normed), decoder_.items(decoder_.hidden), step_.rows,
             {Goal::store, step_.logits, decoder_.head.out, 1.0f, decoder_.softcap}},
            &decoder_.layers[0].qkv);
    if (!step_.largest) return;
    team.each(self, step_.rows, [&](int64_t row) {
      step_.largest[row] = first_largest(step_.logits + row * decoder_.head.out, decoder_.head.out);
    });
  }

  static const uint32_t* items(const void* elements) {
    return static_cast<const uint32_t*>(elements);
  }

  // `following`: whose weights are read next.
  void product(Team& team, int self, const Product& made, const Matrix* following) {
    const Matrix& matrix = *made.matrix;
    const Cut cut(made, decoder_.kernels->pace, team.size());
    const uint8_t* later = nullptr;
    if (following) {
      const Pace& pace = decoder_.kernels->pace;
      const int64_t first = self * panels_of_share(*following, made.rows, pace, team.size());
      later = following->panel(std::min(following->panels() - 1, first));
    }
    int64_t last_row = -1;
    team.each_in_row(self, cut.shares, [&](int64_t share, int64_t next) {
      const int64_t panel = share % cut.chunks * cut.chunk_panels;
      const int64_t row = share / cut.chunks * cut.block_rows;
      decoder_.kernels->product(
          made, decoder_.activation, panel, std::min(panel + cut.chunk_panels, matrix.panels()), row,
          std::min(row + cut.block_rows, made.rows), row == last_row,
          next < cut.shares ? matrix.panel(next % cut.chunks * cut.chunk_panels) : later);
      last_row = row;
    });
  }

  // False: a hook has failed and all threads leave.
  bool seam(Team& team, int self, Seam seam, int layer) {
    if (!hook_) return true;
    team.each(
        self, 1,
        [&](int64_t) {
          try {
            (*hook_)(seam, layer);
          } catch (...) {
            failure_ = std::current_exception();
            is_left_ = true;
          }
        },
        1);
    return !is_left_;
  }

  const Decoder& decoder_;
  const Step& step_;
  SeamHook* const hook_;
  const Workspace work_;
  std::vector<size_t> plan_of_;  // by layer
  std::vector<Plan> plans_;      // of the first layer of those that share one
  std::vector<Tracks> tracks_;  // by group of states
  Scratch scratch_;
  std::exception_ptr failure_;
  std::atomic<bool> is_left_{false};  // read by threads that come late, too
};

}  // namespace

int64_t attention_bytes(const Decoder& decoder, int threads, int64_t longest_tokens) {
  threads = team_threads(threads);
  const int64_t floats = most_record_floats(bare_call(decoder), threads, longest_tokens);
  return threads * Scratch::slice(slice_bytes(decoder)) + 4 * floats;
}

Passed forward(const Decoder& decoder, const Step& step, SeamHook* hook) {
  TeamWay way = step.way;
  way.threads = team_threads(way.threads);
  const int64_t began_ns = now_ns();
  Pass pass(decoder, step, hook, way.threads);
  std::vector<int64_t> lost_ns = with_team(way, [&](Team& team, int self) { pass.run(team, self); });
  pass.rethrow();
  return {pass.used_bytes(), now_ns() - began_ns, std::move(lost_ns)};
}

}  // namespace kvell
