// Mixers and states as Python hands them over, as views; what only the data can tell is checked.
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "attention/arguments.h"
#include "mixer.h"

namespace kvell {

// heads, head_size, groups, state_size, window
using MixerSizes = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
// convolution, its bias, biases of steps, decays, skips
using MixerConstants = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
// least step, most step, is the norm before the gate?, factor of what is added to the stream
using MixerRule = std::tuple<float, float, bool, float>;
// first page's numbers, stride in bytes, element
using StateRowsArgs = std::tuple<uintptr_t, int64_t, int>;
// window, recurrent, pages, part, group
using StatePagesArgs = std::tuple<StateRowsArgs, StateRowsArgs, int64_t, int32_t, int32_t>;
// requests, cuts, slices; query_starts, starts, page_ids, cut_requests, cut_tokens, cut_page_ids,
// end_page_ids (0: none)
using StateBatchArgs = std::tuple<std::tuple<int32_t, int32_t, int32_t>, std::vector<uintptr_t>>;

inline MixerShape shape_of(const MixerSizes& sizes) {
  const auto& [heads, head_size, groups, state_size, window] = sizes;
  if (heads < 1 || head_size < 1 || state_size < 1 || groups < 1 || heads % groups)
    refuse("mixer: groups must divide heads, and all sizes be positive");
  if (window < 1 || window > kMostWindow)
    refuse("mixer: a convolution reads 1 to " + std::to_string(kMostWindow) + " earlier inputs");
  return {heads, head_size, groups, state_size, window};
}

inline StateRows rows_of(const StateRowsArgs& args) {
  const auto& [first, stride_bytes, element] = args;
  if (element != int(Element::float32) && element != int(Element::bfloat16))
    refuse("states: float32 or bfloat16");
  return {at<uint8_t>(first), stride_bytes, static_cast<Element>(element)};
}

inline StatePages pages_of(const StatePagesArgs& args) {
  const auto& [window, recurrent, pages, part, group] = args;
  if (part < 0 || group < 0) refuse("states: a part and a group");
  return {rows_of(window), rows_of(recurrent), pages, part, group};
}

inline StateBatch states_of(const StateBatchArgs& args) {
  const auto& [counts, pointers] = args;
  if (pointers.size() != 7) refuse("states: seven tables");
  const auto table = [&](int index) { return at<const int32_t>(pointers[index]); };
  return {std::get<0>(counts), std::get<1>(counts), std::get<2>(counts), table(0), table(1),
          table(2), table(3), table(4), table(5), table(6)};
}

inline void check_states(const StatePages& pages, const StateBatch& batch, int64_t tokens) {
  const int64_t slices = batch.slices;
  check_starts("query_starts", batch.query_starts, batch.requests, tokens);
  check_below("starts", batch.starts, batch.requests, INT32_MAX);
  check_below("page_ids", batch.page_ids, batch.requests * slices, pages.pages);
  check_below("cut_requests", batch.cut_requests, batch.cuts, batch.requests);
  check_below("cut_page_ids", batch.cut_page_ids, batch.cuts * slices, pages.pages);
  for (int32_t cut = 0; cut < batch.cuts; ++cut)
    if (batch.cut_tokens[cut] < 1 || batch.cut_tokens[cut] > batch.new_tokens(batch.cut_requests[cut]))
      refuse("cut_tokens: a cut lies outside its request's new tokens");
  if (!batch.end_page_ids) return;
  for (int64_t i = 0; i < batch.requests * slices; ++i)
    if (batch.end_page_ids[i] < -1 || batch.end_page_ids[i] >= pages.pages)
      refuse("end_page_ids: no such page");
}

}  // namespace kvell
