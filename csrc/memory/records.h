// The pool's memory: one record per small page and per large page, in flat arrays
// that the system hands out as zero pages, so that what was never used costs nothing. A
// record of a page is half a cache line, of a large page a whole one.
//
// Inside the core a page is a *slot*: large page << shift | index, whatever its group
// has of pages per large page. Slots order as page ids do within a group.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace kvell::memory {

constexpr int32_t kNoGroup = -1;
constexpr int32_t kShared = 0;  // no holder has handle 0
// Owner of large pages that only cached pages are put into, by their rank (KEEPERS in
// tests/oracle/pages/pool.py).
constexpr int32_t keeper(int64_t rank) { return -2 - int32_t(rank); }

// Place in the eviction order; the smallest goes first. Packed, it leaves a record room.
struct __attribute__((packed, aligned(4))) Key {
  uint64_t stamp = 0;      // rank, time and class
  uint32_t shortness = 0;  // longer prefixes have less of it

  bool operator<(const Key& other) const {
    return stamp != other.stamp ? stamp < other.stamp : shortness < other.shortness;
  }
  bool operator==(const Key& other) const {
    return stamp == other.stamp && shortness == other.shortness;
  }
};

constexpr int kRankShift = 56, kTimeShift = 7;
inline uint64_t make_stamp(int64_t rank, int64_t time, int32_t eviction_class) {
  return uint64_t(rank) << kRankShift | uint64_t(time) << kTimeShift | uint64_t(eviction_class);
}
inline Key make_key(uint64_t stamp, int64_t prefix) { return {stamp, ~uint32_t(prefix)}; }
inline int64_t rank_of(const Key& key) { return int64_t(key.stamp >> kRankShift); }
inline int64_t time_of(const Key& key) {
  return int64_t((key.stamp & ((uint64_t(1) << kRankShift) - 1)) >> kTimeShift);
}
inline int32_t class_of(const Key& key) {
  return int32_t(key.stamp & ((uint64_t(1) << kTimeShift) - 1));
}
inline int64_t prefix_of(const Key& key) { return int64_t(uint32_t(~key.shortness)); }

struct PageRecord {  // all zero: empty
  Key key;
  int32_t node;   // where the index names it; 0: nowhere
  int32_t end;    // length of the prefix that it ends, while named
  uint32_t run;   // in a queue of cached pages; 0: in none
  int32_t after;  // its neighbour there
  union {
    int32_t refs;    // of a page in no queue
    int32_t before;  // the other neighbour: nobody uses a cached page
  };

  bool cached() const { return run != 0; }
  int32_t users() const { return run ? 0 : refs; }
};
static_assert(sizeof(PageRecord) == 32);

struct alignas(64) LargeRecord {  // all zero: in no group
  int32_t group_plus_one;
  int32_t owner;
  int32_t used;
  int32_t cached;
  int32_t room;    // empty pages
  int32_t written;  // its first pages, used at least once
  uint32_t listed;
  Key key;       // of its youngest page, while it is in the queue
  uint32_t run;  // in the queue of evictable large pages; 0: not in it
  int32_t before, after;
  // Its pages worth something may be of several classes: who goes last depends on the time, too.
  bool is_mixed;

  int32_t group() const { return group_plus_one - 1; }
};

template <class T>
class ZeroArray {
 public:
  explicit ZeroArray(size_t count) : memory_(std::calloc(count * sizeof(T) + kLine, 1)) {
    if (!memory_) throw std::bad_alloc();
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory_.get());
    data_ = reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
    ask_for_huge_pages((address + kHuge - 1) / kHuge * kHuge, address + count * sizeof(T));
  }
  T& operator[](size_t index) { return data_[index]; }
  const T& operator[](size_t index) const { return data_[index]; }
  // It is going to be written: the wait for memory begins now.
  void fetch(size_t index) const { __builtin_prefetch(data_ + index, 1); }

 private:
  static constexpr size_t kLine = 64;  // bytes of a cache line: no record straddles two
  static constexpr size_t kHuge = size_t(1) << 21;
  // A step that takes pages for the first time would wait for the system every 4 KiB of records,
  // which is as long as placing a dozen pages takes; and records lie far apart.
  static void ask_for_huge_pages([[maybe_unused]] uintptr_t begin, [[maybe_unused]] uintptr_t end) {
#ifdef MADV_HUGEPAGE
    if (begin + kHuge <= end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  }
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  T* data_;
};

}  // namespace kvell::memory
