// The Python face: addresses and sizes in, nothing allocated for Python, the GIL released.
//
// models/fused keeps what the addresses point at alive and knows its dtypes and shapes; what
// only the data can tell (token ids, page ids, starts) is checked here before it is used.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention/arguments.h"
#include "model.h"
#include "state_arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell {
namespace {

using NormArgs = std::tuple<uintptr_t, float>;                          // weight (0: none), epsilon
// data, factors (0: none), bias (0: none), out, in, form
using MatrixArgs = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int>;
using RuleArgs = std::tuple<float, float, int32_t>;                     // scale, softcap, window
using Memory = std::tuple<uintptr_t, int64_t>;                          // address, bytes
using WayArgs = std::tuple<int, bool, uint64_t, int64_t, int64_t>;
using EmbeddingArgs = std::tuple<uintptr_t, int64_t, float>;  // table (0: the head's), vocab, scale

Norm norm_of(const NormArgs& args) { return {at<const float>(std::get<0>(args)), std::get<1>(args)}; }

class CallbackHook : public SeamHook {
 public:
  explicit CallbackHook(nb::object callback) : callback_(std::move(callback)) {}
  void operator()(Seam seam, int layer) override {
    nb::gil_scoped_acquire acquire;
    callback_(static_cast<int>(seam), layer);
  }

 private:
  nb::object callback_;
};

class Forward {
 public:
  // sizes: hidden, heads, kv_heads, head_size, intermediate
  Forward(const std::string& instruction_set, int element,
          const std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>& sizes, int activation,
          float softcap, const EmbeddingArgs& embedding, const NormArgs& final_norm,
          const MatrixArgs& head) {
    decoder_.kernels = kernels_named(instruction_set.c_str(), static_cast<Element>(element));
    decoder_.attention = backend_named(instruction_set.c_str());
    if (!decoder_.kernels || !decoder_.attention)
      refuse("instruction_set: this processor has no " + instruction_set);
    std::tie(decoder_.hidden, decoder_.heads, decoder_.kv_heads, decoder_.head_size,
             decoder_.intermediate) = sizes;
    decoder_.activation = static_cast<Activation>(activation);
    decoder_.softcap = softcap;
    decoder_.final_norm = norm_of(final_norm);
    decoder_.head = matrix_of(head);
    const auto& [table, vocab, scale] = embedding;
    decoder_.embedding = {at<const uint8_t>(table), table ? nullptr : &decoder_.head, vocab,
                          decoder_.hidden, scale};
  }

  void add_rope(const std::vector<float>& frequencies, float factor) {
    if (2 * int64_t(frequencies.size()) > decoder_.head_size) refuse("rope: wider than a head");
    decoder_.ropes.push_back({frequencies, factor});
  }

  // norms: before attention, query, key, after attention, before MLP, after MLP
  // matrices: qkv, out, gate and up, down; factors: of what attention and MLP add to the stream
  void add_layer(const std::vector<NormArgs>& norms, const std::vector<MatrixArgs>& matrices,
                 const std::tuple<float, float>& factors, int rope, const RuleArgs& rule) {
    if (norms.size() != 6 || matrices.size() != 4) refuse("layer: six norms and four matrices");
    if (rope >= int(decoder_.ropes.size())) refuse("layer: no such rope");
    const auto& [scale, softcap, window_tokens] = rule;
    decoder_.layers.push_back({norm_of(norms[0]), norm_of(norms[1]), norm_of(norms[2]),
                               norm_of(norms[3]), norm_of(norms[4]), norm_of(norms[5]),
                               matrix_of(matrices[0]), matrix_of(matrices[1]),
                               matrix_of(matrices[2]), matrix_of(matrices[3]),
                               std::get<0>(factors), std::get<1>(factors), rope,
                               {scale, softcap, window_tokens, 0, nullptr}, 0, {}, {}});
  }

  // Beside the attention of the layer that was added last, whose first matrix makes its input too.
  void add_mixer(const MixerSizes& sizes, const MixerConstants& constants, const MixerRule& rule,
                 const NormArgs& norm, const MatrixArgs& out) {
    if (decoder_.layers.empty()) refuse("mixer: add its layer first");
    decoder_.mixer = shape_of(sizes);
    const auto& [convolution, bias, step_bias, decays, skips] = constants;
    const auto& [least_step, most_step, norm_before_gate, factor] = rule;
    decoder_.layers.back().mixer = {at<const float>(convolution), at<const float>(bias),
                                    at<const float>(step_bias), at<const float>(decays),
                                    at<const float>(skips), least_step, most_step, norm_of(norm),
                                    norm_before_gate, matrix_of(out), factor, {}};
  }

  // layers: pages of each, and which of a step's groups is its own; states: of each mixer
  void attach(const std::vector<LayerArgs>& layers, const std::vector<int>& groups,
              const std::vector<StatePagesArgs>& states) {
    if (layers.size() != decoder_.layers.size() || groups.size() != layers.size())
      refuse("attach: pages and a group for every layer");
    for (size_t i = 0; i < layers.size(); ++i) {
      const Layer pages = layer_of(layers[i]);
      if (pages.kv_heads != decoder_.kv_heads || pages.head_size != decoder_.head_size)
        refuse("attach: pages of another shape");
      const DecoderLayer& layer = decoder_.layers[i];
      if (layer.qkv.out != decoder_.qkv_size() + (layer.mixer ? decoder_.mixer.projected() : 0))
        refuse("attach: a layer's first matrix makes its queries, keys, values, and its mixer's input");
      decoder_.layers[i].pages = pages;
      decoder_.layers[i].group = groups[i];
    }
    size_t next = 0;
    for (DecoderLayer& layer : decoder_.layers)
      if (layer.mixer) {
        if (next == states.size()) refuse("attach: states for every mixer");
        layer.mixer.pages = pages_of(states[next++]);
      }
    if (next != states.size()) refuse("attach: states for every mixer, and no others");
    attached_ = true;
  }

  int64_t workspace_bytes(int64_t tokens, int64_t rows) const {
    return Workspace(decoder_, tokens, rows, nullptr).bytes;
  }

  // Where the queries and the attention's output of a step lie in its workspace.
  std::tuple<int64_t, int64_t> attention_offsets(int64_t tokens, int64_t rows) const {
    const Workspace work(decoder_, tokens, rows, nullptr);
    return {reinterpret_cast<intptr_t>(work.query), reinterpret_cast<intptr_t>(work.attended)};
  }

  int64_t attention_bytes(int threads, int64_t longest_tokens) const {
    return kvell::attention_bytes(decoder_, threads, longest_tokens);
  }

  // tokens: (count, ids, positions); rows: (count, logits_rows)
  // groups: (metadata as of attention, write_page_ids, write_offsets); states: of groups of states
  // hook: called or None; workspace, scratch: (address, bytes); away: what others hold, or None
  // way: (threads, is_shared, resting, work_ns, rest_ns), see TeamWay
  // Returns how many bytes of both it used; if wanted, where each row's logits are largest; how long it
  // took, and what of that each thread lost to others on its processor, both in nanoseconds.
  std::tuple<int64_t, std::vector<int64_t>, int64_t, std::vector<int64_t>> run(const std::tuple<int64_t, uintptr_t, uintptr_t>& tokens,
           const std::tuple<int64_t, uintptr_t>& rows,
           const std::vector<std::tuple<BatchArgs, uintptr_t, uintptr_t>>& groups,
           const std::vector<StateBatchArgs>& states, const Memory& workspace, const Memory& scratch,
           uintptr_t logits, bool wants_largest, const WayArgs& way, nb::object hook, Away* away) {
    if (!attached_) refuse("run: attach pages first");
    const auto& [count, ids, positions] = tokens;
    const auto& [rows_count, logits_rows] = rows;
    std::vector<int64_t> largest(wants_largest ? size_t(rows_count) : 0);
    Step step{count, at<const int64_t>(ids), at<const int64_t>(positions), rows_count,
              at<const int64_t>(logits_rows), {}, {}, at<uint8_t>(std::get<0>(workspace)),
              at<uint8_t>(std::get<0>(scratch)), std::get<1>(scratch), at<float>(logits),
              largest.empty() ? nullptr : largest.data(), way_of(way), away};
    for (const auto& [batch, write_page_ids, write_offsets] : groups)
      step.groups.push_back({batch_of(batch), at<const int32_t>(write_page_ids),
                             at<const int32_t>(write_offsets)});
    for (const StateBatchArgs& batch : states) step.states.push_back(states_of(batch));
    check(step, groups);
    const int64_t need = workspace_bytes(count, rows_count), room = std::get<1>(workspace);
    if (need > room)
      refuse("workspace: the step needs " + std::to_string(need) + " bytes and has " +
             std::to_string(room));
    if (count == 0) return {0, largest, 0, {}};
    std::unique_ptr<CallbackHook> called;
    if (!hook.is_none()) called = std::make_unique<CallbackHook>(hook);
    Passed passed;
    {
      nb::gil_scoped_release release;
      passed = forward(decoder_, step, called.get());
    }
    return {passed.used_bytes, std::move(largest), passed.took_ns, std::move(passed.lost_ns)};
  }

 private:
  static TeamWay way_of(const WayArgs& args) {
    const auto& [threads, is_shared, resting, work_ns, rest_ns] = args;
    if (work_ns < 0 || rest_ns < 0 || rest_ns > 1000000000) refuse("way: no such time");
    return {threads, is_shared, resting, work_ns, rest_ns};
  }

  Matrix matrix_of(const MatrixArgs& args) const {
    const auto& [data, factors, bias, out, in, form] = args;
    if (decoder_.items(in) * 4 != in * decoder_.element_size())
      refuse("matrix: rows must be whole items");
    if (form < int(Form::plain) || form > int(Form::int4)) refuse("matrix: no such form");
    return {at<const uint8_t>(data), at<const float>(bias), out, decoder_.items(in),
            static_cast<Form>(form), form ? (in + kGroup - 1) / kGroup : 0, at<const float>(factors)};
  }

  void check(const Step& step,
             const std::vector<std::tuple<BatchArgs, uintptr_t, uintptr_t>>& groups) const {
    check_all("token_ids", step.ids, step.tokens, decoder_.embedding.vocab);
    check_all("positions", step.positions, step.tokens, INT32_MAX);
    check_all("logits_rows", step.logits_rows, step.rows, step.tokens);
    std::vector<bool> seen(step.groups.size()), seen_states(step.states.size());
    for (const DecoderLayer& layer : decoder_.layers) {
      check_mixer(step, layer.mixer, seen_states);
      if (layer.group < 0 || layer.group >= int(groups.size())) refuse("groups: one is missing");
      if (seen[layer.group]) continue;
      seen[layer.group] = true;
      const BatchArgs& args = std::get<0>(groups[layer.group]);
      const GroupStep& group = step.groups[layer.group];
      check_batch(layer.pages, group.batch, std::get<6>(args), step.tokens);
      check_below("write_page_ids", group.write_page_ids, step.tokens, layer.pages.num_pages());
      check_below("write_offsets", group.write_offsets, step.tokens, layer.pages.page_tokens);
    }
  }

  static void check_mixer(const Step& step, const Mixer& mixer, std::vector<bool>& seen) {
    if (!mixer) return;
    const StatePages& pages = mixer.pages;
    if (pages.group >= int(step.states.size())) refuse("states: a group is missing");
    if (pages.part >= step.states[pages.group].slices) refuse("states: requests have fewer pages");
    if (!seen[pages.group]) check_states(pages, step.states[pages.group], step.tokens);
    seen[pages.group] = true;
  }

  static void check_all(const char* name, const int64_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i)
      if (values[i] < 0 || values[i] >= limit)
        refuse(std::string(name) + ": " + std::to_string(values[i]) + " is not below " +
               std::to_string(limit));
  }

  Decoder decoder_{};
  bool attached_ = false;
};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (int i = 0; const Kernels* kernels = kernels_at(i, Element::float32); ++i)
    names.emplace_back(kernels->name);
  return names;
}

}  // namespace
}  // namespace kvell

NB_MODULE(_forward, m) {
  using kvell::Forward;
  m.doc() = "Decoders over paged memory, compiled. Use kvell.models.fused.";
  m.def("instruction_sets", &kvell::instruction_sets,
        "Names of the instruction sets this processor can run, best first.");
  nb::class_<Forward>(m, "Forward")
      .def(nb::init<const std::string&, int,
                    const std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>&, int, float,
                    const kvell::EmbeddingArgs&, const kvell::NormArgs&,
                    const kvell::MatrixArgs&>(),
           "instruction_set"_a, "element"_a, "sizes"_a, "activation"_a, "softcap"_a,
           "embedding"_a, "final_norm"_a, "head"_a)
      .def("add_rope", &Forward::add_rope, "frequencies"_a, "factor"_a)
      .def("add_layer", &Forward::add_layer, "norms"_a, "matrices"_a, "factors"_a, "rope"_a, "rule"_a)
      .def("add_mixer", &Forward::add_mixer, "sizes"_a, "constants"_a, "rule"_a, "norm"_a, "out"_a)
      .def("attach", &Forward::attach, "layers"_a, "groups"_a, "states"_a)
      .def("workspace_bytes", &Forward::workspace_bytes, "tokens"_a, "rows"_a)
      .def("attention_bytes", &Forward::attention_bytes, "threads"_a, "longest_tokens"_a)
      .def("attention_offsets", &Forward::attention_offsets, "tokens"_a, "rows"_a)
      .def("run", &Forward::run, "tokens"_a, "rows"_a, "groups"_a, "states"_a, "workspace"_a,
           "scratch"_a, "logits"_a, "wants_largest"_a, "way"_a, "hook"_a.none(), "away"_a.none() = nb::none());
}
