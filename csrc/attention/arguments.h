// What Python hands over as integers, as views; and what only the data can tell of it: page
// ids and starts are checked before anything follows them.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention/views.h"

namespace kvell {

// (pool, pool_bytes, page_stride_bytes, layer_offset_bytes, page_tokens, kv_heads, head_size,
//  latent_size, element)
using LayerArgs =
    std::tuple<uintptr_t, int64_t, int64_t, int64_t, int32_t, int32_t, int32_t, int32_t, int>;
// (requests, query_starts, context_lens, table_starts, page_ids, first_positions, pages, tokens)
using BatchArgs = std::tuple<int32_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t,
                             int64_t>;

// (values, starts), zeros for none
using RecordsArgs = std::tuple<uintptr_t, uintptr_t>;

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Layer layer_of(const LayerArgs& args) {
  const auto& [pool, bytes, stride, offset, page_tokens, kv_heads, head_size, latent, element] = args;
  return {at<uint8_t>(pool), bytes, stride, offset, page_tokens, kv_heads, head_size,
          latent, static_cast<Element>(element)};
}

inline Batch batch_of(const BatchArgs& args) {
  return {at<const int32_t>(std::get<1>(args)), at<const int32_t>(std::get<2>(args)),
          at<const int32_t>(std::get<3>(args)), at<const int32_t>(std::get<4>(args)),
          at<const int32_t>(std::get<5>(args)), std::get<0>(args)};
}

inline Records records_of(const RecordsArgs& args) {
  return {at<float>(std::get<0>(args)), at<const int32_t>(std::get<1>(args))};
}

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

inline void check_below(const char* name, const int32_t* values, int64_t count, int64_t limit) {
  uint32_t largest = 0;  // a negative value becomes a very large one
  for (int64_t i = 0; i < count; ++i)
    largest = static_cast<uint32_t>(values[i]) > largest ? static_cast<uint32_t>(values[i]) : largest;
  if (count > 0 && largest >= limit)
    refuse(std::string(name) + ": " + std::to_string(static_cast<int32_t>(largest)) +
           " is not below " + std::to_string(limit));
}

inline void check_starts(const char* name, const int32_t* starts, int32_t requests, int64_t total) {
  if (starts[0] != 0 || starts[requests] != total)
    refuse(std::string(name) + ": must run from 0 to " + std::to_string(total));
  for (int32_t i = 0; i < requests; ++i)
    if (starts[i] > starts[i + 1]) refuse(std::string(name) + ": must not decrease");
}

inline void check_batch(const Layer& layer, const Batch& batch, int64_t pages, int64_t tokens) {
  check_starts("query_starts", batch.query_starts, batch.requests, tokens);
  check_starts("table_starts", batch.table_starts, batch.requests, pages);
  check_below("page_ids", batch.page_ids, pages, layer.num_pages());
  check_below("first_positions", batch.first_positions, batch.requests, INT32_MAX);
  for (int32_t i = 0; i < batch.requests; ++i)
    if (batch.context_lens[i] < batch.new_tokens(i))
      refuse("context_lens: a request has fewer tokens than it brings to this step");
}

}  // namespace kvell
