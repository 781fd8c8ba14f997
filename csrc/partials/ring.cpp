#include "ring.h"

#include <algorithm>

#include "attention/arguments.h"
#include "message.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace kvell {
namespace {

constexpr int kLooks = 2000;

void pause_once() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Ring::Ring(uint8_t* at, int64_t bytes, int64_t slots)
    : at_(at), slots_(uint32_t(slots)), slot_bytes_(0) {
  if (slots < 2 || slots > (1 << 16) || (slots & (slots - 1))) refuse("ring: slots are a power of two");
  if (reinterpret_cast<uintptr_t>(at) % 64) refuse("ring: begins at no multiple of 64");
  slot_bytes_ = (bytes - int64_t(sizeof(RingHead))) / slots / 64 * 64;
  if (slot_bytes_ <= int64_t(sizeof(SlotHead))) refuse("ring: no room for its slots");
}

bool await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers,
                  Deadline deadline) {
  for (int looks = 0; looks < kLooks; ++looks) {
    if (word.load(std::memory_order_acquire) != seen) return true;
    pause_once();
  }
  while (word.load() == seen) {
    const auto left = deadline - std::chrono::steady_clock::now();
    const int64_t left_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
    if (left_ns <= 0) return word.load() != seen;
#if defined(__linux__)
    // Whoever changes the word either sees the sleeper, or has changed it before the system looks at it.
    sleepers.fetch_add(1);
    const timespec span{left_ns / 1000000000, left_ns % 1000000000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &span, nullptr, 0);
    sleepers.fetch_sub(1);
#else
    std::this_thread::yield();
#endif
  }
  return true;
}

void wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers) {
#if defined(__linux__)
  if (sleepers.load() > 0) syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)word;
  (void)sleepers;
#endif
}

uint8_t* RingCreditor::begin(int64_t query_bytes, int64_t answer_bytes) {
  if (whole_lines(query_bytes) + answer_bytes > ring_.room_bytes()) return nullptr;
  const uint32_t answered = ring_.head().answered.load(std::memory_order_acquire);
  const uint32_t due = posted_ - answered, wanted = posted_ - wanted_;
  if (std::max(due, wanted) >= ring_.slots()) return nullptr;
  auto* slot = reinterpret_cast<SlotHead*>(ring_.slot(posted_));
  slot->query_bytes = query_bytes;
  slot->answer_bytes = answer_bytes;
  return reinterpret_cast<uint8_t*>(slot + 1);
}

bool RingCreditor::post() {
  ring_.head().posted.store(++posted_, std::memory_order_release);
  bell_->rung.fetch_add(1);
  wake(bell_->rung, bell_->sleepers);
  return true;
}

AnswerBytes RingCreditor::take(Deadline deadline) {
  if (wanted_ == posted_) return {nullptr, 0};
  RingHead& head = ring_.head();
  uint32_t answered = head.answered.load(std::memory_order_acquire);
  while (int32_t(answered - wanted_) <= 0) {
    if (!await_change(head.answered, answered, head.waiting, deadline)) return {nullptr, 0};
    answered = head.answered.load(std::memory_order_acquire);
  }
  const auto* slot = reinterpret_cast<const SlotHead*>(ring_.slot(wanted_++));
  const int64_t query = whole_lines(std::clamp<int64_t>(slot->query_bytes, 0, ring_.room_bytes()));
  const int64_t room = std::max<int64_t>(0, ring_.room_bytes() - query);
  return {reinterpret_cast<const uint8_t*>(slot + 1) + query, std::clamp<int64_t>(slot->answer_bytes, 0, room)};
}

}  // namespace kvell
