// What an attention call looks at: plain views over memory that Python owns.
#pragma once
#include <cstdint>

namespace kvell {

enum class Element : int { float32 = 0, bfloat16 = 1 };

inline int64_t element_bytes(Element element) { return element == Element::float32 ? 4 : 2; }

// Where one layer's K and V lie (attention/interface.py, LayerPages).
struct Layer {
  uint8_t* pool;
  int64_t pool_bytes;
  int64_t page_stride_bytes;
  int64_t offset_bytes;
  int32_t page_tokens;
  int32_t kv_heads;
  int32_t head_size;
  Element element;

  int64_t row_bytes() const { return head_size * element_bytes(element); }
  int64_t head_bytes() const { return page_tokens * row_bytes(); }
  int64_t value_offset_bytes() const { return kv_heads * head_bytes(); }
  int64_t num_pages() const {
    const int64_t room = pool_bytes - offset_bytes - 2 * value_offset_bytes();
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

// Query rows [token][head][head_size]; strides in elements, of the layer's element type.
struct Query {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
  int32_t heads;
};

// What happens to scores (AttendParams).
struct Rule {
  float scale;
  float softcap;
  int32_t window_tokens;
  const float* sinks;  // [heads] or null
};

// Contiguous [token][head][head_size] in `element`; maximum and denominator
// [token][head] in float32, or null when only the output is wanted.
struct Result {
  void* output;
  Element element;
  float* maximum;
  float* denominator;
};

struct Call {
  Layer layer;
  Batch batch;
  Query query;
  Rule rule;
  Result result;

  int32_t group_heads() const { return query.heads / layer.kv_heads; }
};

}  // namespace kvell
