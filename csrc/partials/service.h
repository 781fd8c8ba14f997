// A creditor's answers to query rows of others, over pages that it lends them: Infinite-LLM §4.
#pragma once
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/backend.h"
#include "loans.h"
#include "message.h"
#include "ring.h"

namespace kvell {

// A layer of the creditor's model; `group`: whose pages of a loan are its own; -1: it lends none.
struct ServedLayer {
  Layer pages;
  Rule rule;
  int group;
};

// One thread answers what comes by rings; `answer` does the same for whoever brings bytes. Both read
// pages that a loan names, by a right that is its debtor's and stands before and after; nothing else.
class Service {
 public:
  // Throws std::invalid_argument if layers differ in their heads, or do not read whole contexts.
  Service(const Backend& backend, Element element, int32_t heads, std::vector<ServedLayer> layers,
          Loans& loans, Bell* bell);
  ~Service() { close(); }
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Answers a debtor's queries from now on; its ring's memory must outlive it. Each debtor has one.
  void connect(int debtor, Ring ring);
  // Returns when nothing of the ring's memory is used any more.
  void disconnect(int debtor);

  void start();
  // Ends the thread, once it has answered what it reads now. No error if there is none.
  void close();

  // Answers to queries which could not be read, so far.
  int64_t wrong() const { return wrong_.load(); }

  // Room for the answer to a query of so many bytes is `room_bytes`. Returns the bytes of the answer.
  int64_t answer(int debtor, const uint8_t* query, int64_t bytes, uint8_t* to, int64_t room_bytes);

  // How large an answer is. Throws std::invalid_argument.
  int64_t answer_bytes(const uint8_t* query, int64_t bytes) const;

  // Throws std::invalid_argument if pages are not those of one section in each group, or do not exist.
  void check_pages(const std::vector<std::vector<int32_t>>& pages) const;

 private:
  struct Served {
    int debtor;
    Ring ring;
    uint32_t answered;
  };

  void serve();
  bool answer_next(Served& served);
  void compute(const QueryMessage& query, int debtor, uint8_t* to);

  const Backend& backend_;
  const Element element_;
  const RowShape shape_;
  const std::vector<ServedLayer> layers_;
  Loans& loans_;
  Bell* const bell_;
  std::mutex mutex_;  // over served_
  std::vector<Served> served_;
  std::atomic<bool> ends_{false};
  std::atomic<int64_t> wrong_{0};
  std::thread thread_;
};

}  // namespace kvell
