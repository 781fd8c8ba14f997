// What a creditor lends: which pages a right stands for, whether it stands, and who reads them now.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace kvell {

class Loans {
 public:
  // words: the table of rights; a right's word, at its remainder, holds its number while it stands.
  Loans(const uint64_t* words, int64_t count) : words_(words), count_(uint64_t(count)) {}

  // Of one section: pages of each group, empty where the group has none in it. They were checked.
  // Throws std::invalid_argument if the number is in use.
  void lend(uint64_t right, int debtor, std::vector<std::vector<int32_t>> pages);

  // Nobody begins to read by it any more. True once nobody reads; false if some still do afterwards.
  bool end(uint64_t right, std::chrono::nanoseconds patience);

  // Begins to read sections, in order, and adds a group's pages of them. False, and nothing is read: one of
  // them is not this debtor's, or revoked, or has no pages of the group.
  bool begin(const uint64_t* rights, int64_t count, int debtor, int group, std::vector<int32_t>& pages);

  // Ends it. Whether the rights stood all the while.
  bool finish(const uint64_t* rights, int64_t count);

  int64_t reading() const { return reading_.load(); }

 private:
  struct Lent {
    int debtor;
    std::vector<std::vector<int32_t>> pages;
    int64_t readers = 0;
    bool over = false;
  };

  bool stands(uint64_t right) const;

  const uint64_t* const words_;
  const uint64_t count_;
  std::mutex mutex_;
  std::condition_variable read_;
  std::map<uint64_t, Lent> lent_;
  std::atomic<int64_t> reading_{0};
};

}  // namespace kvell
