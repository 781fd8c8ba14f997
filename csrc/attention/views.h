// What an attention call looks at: plain views over memory that Python owns.
#pragma once
#include <cstdint>

namespace kvell {

// The eight-bit ones carry a float32 scale behind each vector (attention/quantised.py).
enum class Element : int { float32 = 0, bfloat16 = 1, int8 = 2, float8 = 3 };

inline bool is_quantised(Element element) { return element >= Element::int8; }
inline int64_t element_bytes(Element element) {
  return element == Element::float32 ? 4 : element == Element::bfloat16 ? 2 : 1;
}

// Where one layer's K and V lie (attention/interface.py, LayerPages).
struct Layer {
  uint8_t* pool;
  int64_t pool_bytes;
  int64_t page_stride_bytes;
  int64_t offset_bytes;
  int32_t page_tokens;
  int32_t kv_heads;
  int32_t head_size;
  int32_t latent_size;  // 0, or V is the first `latent_size` numbers of K
  Element element;

  int32_t value_size() const { return latent_size > 0 ? latent_size : head_size; }
  int64_t row_bytes() const {
    return head_size * element_bytes(element) + (is_quantised(element) ? 4 : 0);
  }
  int64_t head_bytes() const { return page_tokens * row_bytes(); }
  int64_t tensor_bytes() const { return kv_heads * head_bytes(); }
  int64_t value_offset_bytes() const { return latent_size > 0 ? 0 : tensor_bytes(); }
  int64_t num_pages() const {
    const int64_t room = pool_bytes - offset_bytes - tensor_bytes() - value_offset_bytes();
    return room < 0 ? 0 : room / page_stride_bytes + 1;
  }
  uint8_t* page(int64_t id) const { return pool + id * page_stride_bytes + offset_bytes; }
};

// One group's metadata for a ragged batch (GroupBatch).
struct Batch {
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* table_starts;
  const int32_t* page_ids;
  const int32_t* first_positions;
  int32_t requests;

  int32_t new_tokens(int request) const {
    return query_starts[request + 1] - query_starts[request];
  }
  int32_t table_pages(int request) const {
    return table_starts[request + 1] - table_starts[request];
  }
  // Position of row `token` (counted over the whole batch), which belongs to `request`.
  int32_t position(int request, int32_t token) const {
    return context_lens[request] - query_starts[request + 1] + token;
  }
  int32_t table_begin(int request, int32_t page_tokens) const {
    return first_positions[request] * page_tokens;
  }
  int32_t table_end(int request, int32_t page_tokens) const {
    return (first_positions[request] + table_pages(request)) * page_tokens;
  }
};

// Query rows [token][head][head_size], float32 or bfloat16; strides in elements.
struct Query {
  const void* data;
  Element element;
  int64_t token_stride;
  int64_t head_stride;
  int32_t heads;
};

// What happens to scores (AttendParams).
struct Rule {
  float scale;
  float softcap;
  int32_t window_tokens;
  int32_t chunk_tokens;
  const float* sinks;  // [heads] or null

  // The earliest position that the token at `own` reads; never falls as `own` grows.
  int32_t first_readable(int32_t own) const {
    const int32_t behind_window = window_tokens > 0 ? own - window_tokens + 1 : 0;
    const int32_t chunk_start = chunk_tokens > 0 ? own - own % chunk_tokens : 0;
    const int32_t first = behind_window > chunk_start ? behind_window : chunk_start;
    return first > 0 ? first : 0;
  }

  // Does a layer under the other rule read the same positions?
  bool reads_like(const Rule& other) const {
    return window_tokens == other.window_tokens && chunk_tokens == other.chunk_tokens;
  }
};

// Contiguous [token][head][value_size] in `element`; maximum and denominator
// [token][head] in float32, or null when only the output is wanted.
struct Result {
  void* output;
  Element element;
  float* maximum;
  float* denominator;
};

// Finished records of whole sections, as instances send them to each other (attention/sections.py).
// Request i's are [records][its new tokens][heads][2 + value_size] floats: the largest score, the sum of
// exp(score - largest), and the unnormalised output. They begin `starts[i]` rows of all heads behind `values`.
struct Records {
  float* values = nullptr;
  const int32_t* starts = nullptr;  // null: none are given, or wanted

  int32_t count(int32_t request, const Batch& batch) const {
    const int32_t rows = batch.new_tokens(request);
    return rows > 0 ? (starts[request + 1] - starts[request]) / rows : 0;
  }
};

struct Call {
  Layer layer;
  Batch batch;
  Query query;
  Rule rule;
  Result result;
  Records elsewhere{};  // of the sections before each table, which the totals begin with
  Records partials{};   // to be left instead of a result

  int32_t group_heads() const { return query.heads / layer.kv_heads; }
};

}  // namespace kvell
