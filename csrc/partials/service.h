// A creditor's answers to query rows of others, over pages that it lends them: Infinite-LLM §4.
#pragma once
#include <atomic>
#include <vector>

#include "attention/backend.h"
#include "loans.h"
#include "message.h"

namespace kvell {

// A layer of the creditor's model; `group`: whose pages of a loan are its own; -1: it lends none.
struct ServedLayer {
  Layer pages;
  int group;
};

// Answers queries, which come as bytes. It reads pages that a loan names, by a right that is its debtor's
// and stands before and after; nothing else. Any thread may call it.
class Service {
 public:
  // Throws std::invalid_argument if pages do not divide a section.
  Service(const Backend& backend, std::vector<ServedLayer> layers, Loans& loans);
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  // Answers to queries which could not be read, so far.
  int64_t wrong() const { return wrong_.load(); }

  // Room for the answer to a query of so many bytes is `room_bytes`. Returns the bytes of the answer.
  int64_t answer(int debtor, const uint8_t* query, int64_t bytes, uint8_t* to, int64_t room_bytes);

  // How large an answer is. Throws std::invalid_argument.
  int64_t answer_bytes(const uint8_t* query, int64_t bytes) const;

  // Throws std::invalid_argument if pages are not those of one section in each group, or do not exist.
  void check_pages(const std::vector<std::vector<int32_t>>& pages) const;

 private:
  // A query that was checked, and its rows.
  struct Read {
    const ServedLayer& layer;
    RowShape shape;
    QueryMessage query;

    int64_t answer_bytes() const;
  };

  Read read(const uint8_t* query, int64_t bytes) const;
  void compute(const Read& read, int debtor, uint8_t* to);

  const Backend& backend_;
  const std::vector<ServedLayer> layers_;
  Loans& loans_;
  std::atomic<int64_t> wrong_{0};
};

}  // namespace kvell
