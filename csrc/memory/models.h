// The models whose groups share a pool, by name.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "rules.h"

namespace kvell::memory {

struct UnknownModel {
  std::string name;
};

class Models {
 public:
  // `names`: of each group its model's. Groups that are all of further models may follow.
  Models(const Groups& groups, const std::vector<std::string>& names) : groups_(groups) {
    add(0, names);
  }
  // Of the groups from `first` on.
  void add(size_t first, const std::vector<std::string>& names);

  // Throws UnknownModel.
  const Model& at(const std::string& name) const;

 private:
  const Groups& groups_;
  std::unordered_map<std::string, Model> models_;
};

}  // namespace kvell::memory
