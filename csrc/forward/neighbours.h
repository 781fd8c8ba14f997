// What a thread does about others that run on its processor.
//
// A thread that the system takes from its processor in the middle of a share holds up its whole
// team, for milliseconds where a phase takes microseconds. One that rests between two shares holds
// up nobody, and gives the neighbour its time meanwhile; when it wakes, a short slice lets it in.
#pragma once
#include <cstdint>
#include <ctime>

#if defined(__linux__)
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#endif

namespace kvell {

// How a team goes through a pass.
struct TeamWay {
  int threads = 0;          // 0: OpenMP's number
  bool is_shared = false;   // nobody waits for a thread that holds no share
  uint64_t resting = 0;     // by bit: threads that rest
  int64_t work_ns = 0;      // so long after a rest, between two shares
  int64_t rest_ns = 0;      // and for so long

  bool rests(int self) const { return is_shared && self < 64 && resting >> self & 1; }
};

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

#if defined(__linux__)

// Time that a thread could have run and did not, as the system counts it.
class Delay {
 public:
  Delay() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
  ~Delay() {
    if (file_ >= 0) close(file_);
  }
  Delay(const Delay&) = delete;
  Delay& operator=(const Delay&) = delete;

  // Of the calling thread, since it began; 0 where the system does not tell.
  static int64_t of_this_thread_ns() {
    thread_local Delay delay;
    return delay.read_ns();
  }

 private:
  // "<nanoseconds run> <nanoseconds waited> <slices>"
  int64_t read_ns() const {
    char text[80];
    const ssize_t size = file_ < 0 ? 0 : pread(file_, text, sizeof(text) - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    char* end = nullptr;
    std::strtoll(text, &end, 10);
    return std::strtoll(end, nullptr, 10);
  }

  const int file_;
};

// Asks for slices of so many nanoseconds for the calling thread; 0: the system's own. Older systems
// (before Linux 6.12) ignore it.
inline void ask_slice(int64_t slice_ns) {
  thread_local int64_t asked_ns = 0;
  if (asked_ns == slice_ns) return;
  asked_ns = slice_ns;
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
    uint32_t least, most;
  } attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != 0) return;  // whoever chose another policy is obeyed
  attributes.runtime = uint64_t(slice_ns);
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

inline void rest(int64_t rest_ns) {
  const timespec time{time_t(rest_ns / 1000000000), long(rest_ns % 1000000000)};
  clock_nanosleep(CLOCK_MONOTONIC, 0, &time, nullptr);
}

#else

struct Delay {
  static int64_t of_this_thread_ns() { return 0; }
};
inline void ask_slice(int64_t) {}
inline void rest(int64_t) {}

#endif

}  // namespace kvell
