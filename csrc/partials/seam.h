// Who holds sections of a step's requests in another instance: what a pass asks it, it asks here.
//
//   post phase:  begin ─► the query is written there ─► post          (never waits)
//   wait phase:  take ─► the answer of the oldest query that was posted (until a deadline)
//
// A query and an answer are runs of bytes (message.h), so that a creditor may be reached through
// memory or a connection. Only the thread that called the pass comes here.
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
  // Where to write a query; null if it is refused: too many are under way, or nobody is there.
  virtual uint8_t* begin(int64_t query_bytes, int64_t answer_bytes) = 0;
  // Sends what was written. False: it could not be.
  virtual bool post() = 0;
  virtual AnswerBytes take(Deadline deadline) = 0;
  // Answers that are still due are not wanted any more; they may come all the same.
  virtual void forget() = 0;
};

}  // namespace kvell
