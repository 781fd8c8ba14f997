#include "tables.h"

#include <algorithm>
#include <numeric>

namespace kvell::batching {

namespace {

int64_t sum(const Longs& values) { return std::accumulate(values.begin(), values.end(), int64_t(0)); }

}  // namespace

std::vector<int32_t> PageTables::arrays(int64_t index, const Work& work, const Longs& away) const {
  const Group& group = groups_.at(size_t(index));
  const size_t n = work.size();
  const auto first_page = [&](size_t i) { return group.first_page(work.starts[i], away.empty() ? 0 : away[i]); };
  const int64_t size = group.rules.page_tokens, tokens = sum(work.counts);

  std::vector<std::pair<const int32_t*, int64_t>> parts(n);  // each request's pages that are read
  int64_t num_pages = 0;
  for (size_t i = 0; i < n; ++i) {
    const auto& table = pages(work.handles[i], index);
    const int64_t first = first_page(i);
    const int64_t end = std::min<int64_t>(group.pages_of(work.starts[i] + work.counts[i]),
                                          int64_t(table.size()));
    parts[i] = {table.data() + std::min(first, end), std::max<int64_t>(0, end - first)};
    num_pages += parts[i].second;
  }

  std::vector<int32_t> found(4 * n + 2 + size_t(num_pages + 2 * tokens));
  int32_t* const query_starts = found.data();
  int32_t* const context_lens = query_starts + n + 1;
  int32_t* const table_starts = context_lens + n;
  int32_t* page_ids = table_starts + n + 1;
  int32_t* const first_positions = page_ids + num_pages;
  int32_t *write_page_ids = first_positions + n, *write_offsets = write_page_ids + tokens;
  for (size_t i = 0; i < n; ++i) {
    const auto& [own, count] = parts[i];
    const int64_t start = work.starts[i], first = first_page(i);
    query_starts[i + 1] = query_starts[i] + int32_t(work.counts[i]);
    context_lens[i] = int32_t(start + work.counts[i]);
    table_starts[i + 1] = table_starts[i] + int32_t(count);
    first_positions[i] = int32_t(first);
    for (int64_t j = 0; j < count; ++j) *page_ids++ = own[j];
    int64_t number = start / size - first, offset = start % size;
    for (int64_t t = 0; t < work.counts[i]; ++t) {
      if (number < 0 || number >= count) throw std::invalid_argument("a token of the step has no page");
      *write_page_ids++ = own[number];
      *write_offsets++ = int32_t(offset);
      if (++offset == size) offset = 0, ++number;
    }
  }
  return found;
}

std::vector<int32_t> PageTables::states(int64_t index, const Work& work, int64_t slices) const {
  std::vector<int32_t> found{0};
  found.reserve(1 + work.size() * size_t(2 + slices));
  for (int64_t count : work.counts) found.push_back(found.back() + int32_t(count));
  for (int64_t start : work.starts) found.push_back(int32_t(start));
  for (int64_t handle : work.handles) {
    const auto& table = pages(handle, index);
    if (int64_t(table.size()) < slices) throw std::invalid_argument("a request has no running state");
    for (int64_t slice = 0; slice < slices; ++slice) found.push_back(table[slice]);
  }
  return found;
}

Longs token_rows(const Longs& starts, const Longs& counts, const Longs& logits,
                 const std::vector<Ints>& token_ids) {
  const int64_t tokens = sum(counts), rows = sum(logits);
  Longs found;
  found.reserve(size_t(2 * tokens + rows));
  for (const Ints& ids : token_ids) found.insert(found.end(), ids.data, ids.data + ids.size);
  if (int64_t(found.size()) != tokens) throw std::invalid_argument("token_ids: not one for each token");
  for (size_t i = 0; i < starts.size(); ++i)
    for (int64_t t = 0; t < counts[i]; ++t) found.push_back(starts[i] + t);
  int64_t end = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    end += counts[i];
    for (int64_t row = end - logits[i]; row < end; ++row) found.push_back(row);
  }
  return found;
}

}  // namespace kvell::batching
