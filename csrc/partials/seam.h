// Who holds sections of a step's requests in another instance: what a pass asks it, it asks here.
//
//   post phase:  begin ─► the query is written there ─► post          (never waits)
//   wait phase:  take ─► the answer of the oldest query that was posted (until a deadline)
//
// A query and an answer are runs of bytes (message.h), so that a creditor may be reached through
// any connection. Only the thread that called the pass comes here.
#pragma once
#include <chrono>
#include <cstdint>

namespace kvell {

using Deadline = std::chrono::steady_clock::time_point;

struct AnswerBytes {
  const uint8_t* at;  // null: none came in time, or nobody is there; good until the next call
  int64_t bytes;
};

class Creditor {
 public:
  virtual ~Creditor() = default;
  // Of the largest query together with its answer.
  virtual int64_t room_bytes() const = 0;
  // Where to write a query.
  virtual uint8_t* begin(int64_t query_bytes) = 0;
  // Sends what was written. False: it could not be: too much is under way, or nobody is there.
  virtual bool post() = 0;
  virtual AnswerBytes take(Deadline deadline) = 0;
};

}  // namespace kvell
