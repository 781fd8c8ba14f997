// Queries and answers in memory that two processes share: one asks, one answers.
//
//   RingHead │ slot 0 │ slot 1 │ …        slot: SlotHead │ query │ answer
//
// Query i lies in slot i modulo their number. `posted` counts queries, by the debtor; `answered`,
// by the creditor, in the same order. Numbers wrap, so slots are a power of two. A slot is used again
// once its answer was taken, or given up and there; a full ring refuses.
#pragma once
#include <atomic>
#include <cstdint>

#include "seam.h"

namespace kvell {

// Wakes a service that sleeps; all that ask it share one, in shared memory.
struct Bell {
  std::atomic<uint32_t> rung, sleepers;
};

struct RingHead {
  alignas(64) std::atomic<uint32_t> posted;
  alignas(64) std::atomic<uint32_t> answered;
  std::atomic<uint32_t> waiting;  // whether the debtor sleeps
};

struct SlotHead {
  alignas(64) int64_t query_bytes;
  int64_t answer_bytes;  // by the debtor: room for it; then by the creditor: its length
};

// What either side knows of a ring; neither believes what the other could have written.
class Ring {
 public:
  // Throws std::invalid_argument if the memory holds no two slots, or slots are no power of two.
  Ring(uint8_t* at, int64_t bytes, int64_t slots);

  static int64_t bytes(int64_t slots, int64_t slot_bytes) { return sizeof(RingHead) + slots * slot_bytes; }

  RingHead& head() const { return *reinterpret_cast<RingHead*>(at_); }
  uint8_t* slot(uint32_t index) const { return at_ + sizeof(RingHead) + (index & (slots_ - 1)) * slot_bytes_; }
  uint32_t slots() const { return slots_; }
  // For a query and its answer.
  int64_t room_bytes() const { return slot_bytes_ - int64_t(sizeof(SlotHead)); }

 private:
  uint8_t* at_;
  uint32_t slots_;
  int64_t slot_bytes_;
};

// Looks for some microseconds, then sleeps while `word` is `seen`, until the deadline at most.
bool await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers,
                  Deadline deadline);
void wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers);

// The debtor's end.
class RingCreditor : public Creditor {
 public:
  RingCreditor(Ring ring, Bell* bell) : ring_(ring), bell_(bell) {}

  int64_t room_bytes() const override { return ring_.room_bytes(); }
  uint8_t* begin(int64_t query_bytes, int64_t answer_bytes) override;
  bool post() override;
  AnswerBytes take(Deadline deadline) override;
  void forget() override { wanted_ = posted_; }

 private:
  Ring ring_;
  Bell* bell_;
  uint32_t posted_ = 0, wanted_ = 0;  // queries; the first whose answer was neither taken nor given up
};

}  // namespace kvell
