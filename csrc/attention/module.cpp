// The Python face: integers in, nothing allocated for Python, the GIL released.
//
// Pointers come as integers because that costs a fifth of a microsecond a call where
// array arguments cost seven. attention/native.py checks dtypes, shapes and strides;
// what only the data can tell (page ids, starts) is checked here before it is used. Where records
// of sections begin, attention/sections.py checks for all kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "attention/arguments.h"
#include "backend.h"
#include "cpu/features.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell {
namespace {

void write_kv_args(const LayerArgs& layer_args, int64_t tokens, uintptr_t page_ids,
                   uintptr_t offsets, uintptr_t key, int64_t key_token_stride,
                   int64_t key_head_stride, uintptr_t value, int64_t value_token_stride,
                   int64_t value_head_stride) {
  const Layer layer = layer_of(layer_args);
  check_below("write_page_ids", at<const int32_t>(page_ids), tokens, layer.num_pages());
  check_below("write_offsets", at<const int32_t>(offsets), tokens, layer.page_tokens);
  // Quantised rows come as bytes, the scale behind each vector.
  const int64_t size = element_bytes(layer.element);
  const int64_t key_strides[] = {key_token_stride * size, key_head_stride * size};
  const int64_t value_strides[] = {value_token_stride * size, value_head_stride * size};
  write_kv(layer, at<const int32_t>(page_ids), at<const int32_t>(offsets), tokens,
           at<const uint8_t>(key), key_strides, at<const uint8_t>(value), value_strides);
}

void attend_args(const std::string& instruction_set, const LayerArgs& layer_args,
                 const BatchArgs& batch_args, uintptr_t query, int query_element,
                 int64_t token_stride, int64_t head_stride, int32_t heads, float scale,
                 int32_t window_tokens, int32_t chunk_tokens, float softcap, uintptr_t sinks, uintptr_t output, int output_element,
                 uintptr_t maximum, uintptr_t denominator, const RecordsArgs& elsewhere,
                 const RecordsArgs& partials, int num_threads) {
  const Backend* backend = backend_named(instruction_set.c_str());
  if (!backend) refuse("instruction_set: this processor has no " + instruction_set);
  const Call call{layer_of(layer_args),
                  batch_of(batch_args),
                  {at<const void>(query), static_cast<Element>(query_element), token_stride,
                   head_stride, heads},
                  {scale, softcap, window_tokens, chunk_tokens, at<const float>(sinks)},
                  {at<void>(output), static_cast<Element>(output_element), at<float>(maximum),
                   at<float>(denominator)},
                  records_of(elsewhere),
                  records_of(partials)};
  check_batch(call.layer, call.batch, std::get<6>(batch_args), std::get<7>(batch_args));
  attend(*backend, call, num_threads);
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (int i = 0; const Backend* backend = backend_at(i); ++i) names.emplace_back(backend->name);
  return names;
}

std::vector<std::string> sets_of_processor() {
  return {processor_sets().begin(), processor_sets().end()};
}

}  // namespace
}  // namespace kvell

NB_MODULE(_kernels, m) {
  using release = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "Attention over paged memory, compiled. Use kvell.attention.native.";
  m.def("instruction_sets", &kvell::instruction_sets,
        "Names of the instruction sets that this build has and this processor runs, best first.");
  m.def("processor_sets", &kvell::sets_of_processor,
        "Names of the instruction sets that this processor runs, best first.");
  m.def("write_kv", &kvell::write_kv_args, "layer"_a, "tokens"_a, "page_ids"_a, "offsets"_a, "key"_a,
        "key_token_stride"_a, "key_head_stride"_a, "value"_a, "value_token_stride"_a,
        "value_head_stride"_a, release());
  m.def("attend", &kvell::attend_args, "instruction_set"_a, "layer"_a, "batch"_a, "query"_a,
        "query_element"_a, "token_stride"_a, "head_stride"_a, "heads"_a, "scale"_a,
        "window_tokens"_a, "chunk_tokens"_a, "softcap"_a,
        "sinks"_a, "output"_a, "output_element"_a, "maximum"_a, "denominator"_a, "elsewhere"_a,
        "partials"_a, "num_threads"_a, release());
}
