// Finding a prompt in the index, and what a request that resumes there starts with
// (tests/oracle/core/lookup.py).
#pragma once
#include <array>

#include "hits.h"
#include "holders.h"
#include "store.h"

namespace kvell::memory {

class Lookup {
 public:
  explicit Lookup(Store& store) : store_(store), hits_(store.groups) {}

  // Tokens that can be resumed.
  int64_t match(Ints tokens, const std::string& root, const Model& model, const Facts& facts);
  // Tokens that each group of the model could resume if it alone decided; -1 for other groups.
  std::vector<int64_t> reach(Ints tokens, const std::string& root, const Model& model,
                             const Facts& facts);
  // All pages of tokens and states that the index names along a text: group, position, page,
  // tokens of the prefix that it ends.
  void known(Ints tokens, const std::string& root, const Model& model,
             std::vector<std::array<int32_t, 4>>& rows);
  // What the last match went along.
  const Path& path() const { return path_; }
  // Holds what a request that resumes at `length` starts with in a group. Pages that are whole
  // and stay as they are, are shared; a state, a page that the prefix fills in part, and
  // pages that will be dropped from, are copied when pages are given.
  // :param tokens: of the prompt.
  void resume(Holder& holder, int32_t group, int64_t length, Ints tokens);

 private:
  void resume_embeddings(Holder& holder, int32_t group, int64_t length, Ints tokens);
  void resume_images(Holder& holder, int32_t group, int64_t length);
  void resume_tokens(Holder& holder, int32_t group, int64_t length);
  void copy(Holder& holder, int32_t group, int64_t position, int64_t length, int32_t slot);

  Store& store_;
  Path path_;  // keeps its memory from call to call
  Hits hits_;
};

}  // namespace kvell::memory
