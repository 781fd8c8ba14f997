// What a cached page is worth beside memory: the part of prompts' tokens that were lately hit
// (tests/oracle/eviction/hit_share.py).
#pragma once
#include <cstdint>

namespace kvell::memory {

class HitShare {
 public:
  // A request begins.
  void note(int64_t hit_tokens, int64_t tokens) {
    if (++requests_ % kHalveRequests == 0) {
      hit_tokens_ /= 2;
      tokens_ /= 2;
    }
    hit_tokens_ += hit_tokens;
    tokens_ += tokens;
  }
  // Is an age at least that part of another?
  bool is_old(int64_t age, int64_t beside) const {
    return static_cast<__int128>(age) * tokens_ >= static_cast<__int128>(beside) * hit_tokens_;
  }

 private:
  static constexpr int64_t kHalveRequests = 64;  // HALVE_REQUESTS in tests/oracle/eviction/hit_share.py
  int64_t hit_tokens_ = 0, tokens_ = 0, requests_ = 0;
};

}  // namespace kvell::memory
