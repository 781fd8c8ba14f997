// Where the states of a step's requests come from and go to.
#include <algorithm>
#include <numeric>

#include "mixer.h"

namespace kvell {

Tracks::Tracks(const StateBatch& batch) {
  std::vector<int32_t> cuts(batch.cuts);
  std::iota(cuts.begin(), cuts.end(), 0);
  std::sort(cuts.begin(), cuts.end(), [&](int32_t a, int32_t b) {
    if (batch.cut_requests[a] != batch.cut_requests[b])
      return batch.cut_requests[a] < batch.cut_requests[b];
    return batch.cut_tokens[a] < batch.cut_tokens[b];
  });
  stops.reserve(batch.cuts + batch.requests);  // tracks point into it
  tracks.reserve(batch.requests);
  const int32_t* ends = batch.end_page_ids ? batch.end_page_ids : batch.page_ids;
  size_t next = 0;
  for (int32_t request = 0; request < batch.requests; ++request) {
    const Stop* first = stops.data() + stops.size();
    for (; next < cuts.size() && batch.cut_requests[cuts[next]] == request; ++next)
      stops.push_back({batch.cut_tokens[cuts[next]],
                       batch.cut_page_ids + int64_t(cuts[next]) * batch.slices});
    const int64_t tokens = batch.new_tokens(request), at = int64_t(request) * batch.slices;
    stops.push_back({tokens, ends + at});
    tracks.push_back({batch.query_starts[request], tokens,
                      batch.starts[request] > 0 ? batch.page_ids + at : nullptr, first,
                      stops.data() + stops.size()});
  }
}

}  // namespace kvell
