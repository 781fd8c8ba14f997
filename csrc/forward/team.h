// Threads that go through a forward pass together, in phases.
//
//   phase:  each takes shares (its own first, then whichever is next)  ──► all meet ──► next phase
//
// One parallel region holds the whole pass: waking threads once for every operator would cost
// a small model as much as its weights do. Whoever waits looks for some microseconds and then
// sleeps, so that a neighbour on the same cores costs its share and not everything.
//
// Where others run on the team's processors (TeamWay::is_shared), a phase ends when its last share is
// done, whoever did it, and nobody waits for a thread that holds none:
//
//   phase:  each takes whichever is next  ──► the last share is done ──► next phase
//           a thread that comes late takes part in the phase it finds
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "neighbours.h"
#include "places.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace kvell {

// What a thread of a team knows of itself.
struct alignas(64) Member {
  int64_t phase = 0;
  int64_t rested_ns = 0;  // when its last rest ended
  int64_t lost_ns = 0;
  bool rests = false;
};

class Team {
 public:
  // `members`: one for each thread that was asked for, of which there may be fewer. They are made outside
  // of the parallel region, which no exception may leave.
  Team(int size, const TeamWay& way, std::vector<Member>& members)
      : size_(size), way_(way), members_(members), next_(size) {}

  int size() const { return size_; }

  // A thread of the team begins and ends its pass.
  void enter(int self) {
    Member& member = members_[self];
    member.rests = way_.rests(self);
    member.rested_ns = member.rests ? now_ns() : 0;
    ask_slice(member.rests ? way_.rest_ns : 0);
    member.lost_ns = -Delay::of_this_thread_ns();
  }
  void leave(int self) { members_[self].lost_ns += Delay::of_this_thread_ns(); }

  // Runs `body(share)` for every share in [0, shares); none of the next phase begins before all are
  // done. The first `own` shares are thread 0's, of which there may be one at most.
  template <class Body>
  void each(int self, int64_t shares, Body body, int64_t own = 0) {
    if (way_.is_shared)
      return as_they_come(self, shares, own, [&](int64_t share, int64_t) { body(share); });
    phase([&] {
      for (int64_t share = self; share < shares; share = take()) body(share);
    });
  }

  // The same with `body(share, next)`: which share its thread will probably take next.
  template <class Body>
  void each_in_row(int self, int64_t shares, Body body) {
    if (way_.is_shared) return as_they_come(self, shares, 0, body);
    phase([&] {
      for (int64_t share = self; share < shares;) {
        const int64_t next = take();
        body(share, next);
        share = next;
      }
    });
  }

  // From now on no thread rests: the last one to come back would be waited for.
  void rest_no_more(int self) { members_[self].rests = false; }

  // After the last phase, when the threads are back.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  static constexpr int kLooks = 2000;
  static constexpr int kPhaseShift = 32;  // of a ticket: the phase, then its next share

  // An exception must not leave a thread of the team, and a thread that left would keep the others
  // waiting: so the first one is kept for `rethrow`, and all threads go on from phase to phase with
  // nothing to do.
  template <class Work>
  void guarded(Work work) {
    if (has_failed_.load(std::memory_order_relaxed)) return;
    try {
      work();
    } catch (...) {
      if (!has_failed_.exchange(true)) failure_ = std::current_exception();
    }
  }

  // Runs `work`, then meets the others.
  template <class Work>
  void phase(Work work) {
    guarded(work);
    meet();
  }

  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Returns when all are here; what each wrote before is then seen by all.
  void meet() {
    const int32_t phase = phase_.load(std::memory_order_relaxed);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return wait(phase);
    done_.store(0, std::memory_order_relaxed);
    next_.store(size_, std::memory_order_relaxed);
    begin(phase + 1);
  }

  template <class Body>
  void as_they_come(int self, int64_t shares, int64_t own, Body body) {
    if (shares == 0) return;
    Member& member = members_[self];
    const int64_t phase = member.phase++;
    int64_t done = 0;
    const auto run = [&](int64_t share) {
      guarded([&] { body(share, share + 1); });
      ++done;
    };
    if (self == 0 && own > 0) run(0);
    for (;;) {
      if (member.rests && now_ns() - member.rested_ns > way_.work_ns) {
        give(phase, std::exchange(done, 0), shares);
        rest(way_.rest_ns);
        member.rested_ns = now_ns();
      }
      const int64_t share = claim(phase, shares - own);
      if (share < 0) break;
      run(own + share);
    }
    give(phase, done, shares);
    wait(int32_t(phase));
  }

  // The next share of a phase that is not over; -1: there is none.
  int64_t claim(int64_t phase, int64_t shares) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t next = int64_t(ticket & ((uint64_t(1) << kPhaseShift) - 1));
      if (int64_t(ticket >> kPhaseShift) != phase || next >= shares) return -1;
      if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) return next;
    }
  }

  // Says that so many shares are done: a phase with one that is not cannot be over.
  void give(int64_t phase, int64_t done, int64_t shares) {
    if (done == 0 || done_.fetch_add(done, std::memory_order_acq_rel) + done < shares) return;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(uint64_t(phase + 1) << kPhaseShift, std::memory_order_release);
    begin(int32_t(phase + 1));
  }

  void begin(int32_t phase) {
    phase_.store(phase);  // before it asks who sleeps: see sleep
    if (sleepers_.load() > 0) wake();
  }

  // Until a phase is over.
  void wait(int32_t phase) {
    for (int looks = 0; looks < kLooks; ++looks) {
      if (phase_.load(std::memory_order_acquire) > phase) return;
      pause();
    }
    for (int32_t seen; (seen = phase_.load()) <= phase;) sleep(seen);
  }

  // Whoever ends the phase either sees this sleeper, or has ended it before the system looks
  // at `phase_` once more, and then nobody sleeps.
  void sleep(int32_t phase) {
#if defined(__linux__)
    sleepers_.fetch_add(1);
    syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
#else
    (void)phase;
    std::this_thread::yield();
#endif
  }

  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0);
#endif
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int size_;
  const TeamWay way_;
  std::vector<Member>& members_;
  alignas(64) std::atomic<int64_t> next_;          // share, where all meet
  alignas(64) std::atomic<uint64_t> ticket_{0};    // phase and share, where they come late
  alignas(64) std::atomic<int64_t> done_{0};       // threads of this phase, or shares
  alignas(64) std::atomic<int32_t> phase_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;
};

// How many threads a pass has; 0 asks for OpenMP's number.
inline int team_threads(int asked) {
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return asked > 0 ? asked : omp_get_max_threads();
#else
  (void)asked;
  return 1;
#endif
}

template <class Body>
void run_team(const TeamWay& way, std::vector<Member>& members, Body body) {
#ifdef _OPENMP
  if (way.threads > 1) {
    std::optional<Team> team;
    const Places places(way.threads);
#pragma omp parallel num_threads(way.threads)
    {
      const int self = omp_get_thread_num();
#pragma omp single
      team.emplace(omp_get_num_threads(), way, members);
      places.take(self);
      team->enter(self);
      body(*team, self);
      team->leave(self);
    }
    return team->rethrow();
  }
#endif
  Team alone(1, {}, members);
  alone.enter(0);
  body(alone, 0);
  alone.leave(0);
  alone.rethrow();
}

// Runs `body(team, self)` on `way.threads` threads, or fewer if there are not so many; throws what a
// phase has thrown. Returns of each how long it could have run, and another program did.
template <class Body>
std::vector<int64_t> with_team(const TeamWay& way, Body body) {
  std::vector<Member> members(std::max(1, way.threads));
  run_team(way, members, body);
  std::vector<int64_t> lost_ns;
  for (const Member& member : members) lost_ns.push_back(member.lost_ns);
  return lost_ns;
}

}  // namespace kvell
