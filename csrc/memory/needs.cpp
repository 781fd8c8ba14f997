#include "needs.h"

namespace kvell::memory {
namespace {

// Pages of embeddings that prefill has read to their end.
int64_t consumed_pages(const Rules& group, const Facts& facts, int64_t computed) {
  int64_t pages = 0;
  for (const Image& image : facts.images) {
    if (image.start >= computed) break;
    if (image.end() > computed) {
      const int64_t consumed = (computed - image.start) * image.image_tokens / image.tokens;
      return pages + consumed / group.page_tokens;
    }
    pages += image_pages(group, image);
  }
  return pages;
}

// Most pages of an image and of all images that a chunk from its end on touches.
int64_t pages_near(const Rules& group, const Facts& facts, int64_t until, int64_t chunk) {
  int64_t most = 0;
  for (size_t first = 0; first < facts.images.size(); ++first) {
    if (facts.images[first].start >= until) break;
    const int64_t end = std::min(until, facts.images[first].end() + chunk);
    int64_t sum = 0;
    for (size_t i = first; i < facts.images.size() && facts.images[i].start < end; ++i)
      sum += image_pages(group, facts.images[i]);
    most = std::max(most, sum);
  }
  return most;
}

// Room in `tokens` of pages that hold image tokens beside those of the text.
int64_t mixed_room(const Facts& facts, int64_t tokens) {
  for (const Image& image : facts.images) {
    if (tokens <= image.start) return tokens;
    tokens -= image.image_tokens;
    if (tokens <= image.start) return image.start;
  }
  return tokens;
}

int64_t image_room(const Rules& group, const Facts& facts, int64_t pages) {
  for (const Image& image : facts.images) {
    pages -= image_pages(group, image);
    if (pages < 0) return image.start;
  }
  return kNever;
}

int64_t embedding_room(const Facts& facts, int64_t tokens) {
  for (const Image& image : facts.images)
    if (image.end() > tokens) return std::min(tokens, image.start);
  return tokens;
}

}  // namespace

int64_t end_position(const Rules& group, const Facts& facts, int64_t tokens, int64_t computed) {
  if (tokens <= 0) return 0;
  if (group.kind == Kind::kState) return group.slices;
  int64_t count = tokens;
  const bool in_text = group.counts_tokens();
  if (!in_text || group.counts_images || group.holds_embeddings) {
    int64_t pages = 0;
    for (const Image& image : facts.images) {
      if (image.start >= tokens) break;
      if (!in_text)
        pages += image_pages(group, image);
      else
        count = group.counts_images ? count + image.image_tokens : std::max(count, image.end());
    }
    if (!in_text) return pages;
  } else if (const int64_t dropped = dropped_tokens(group, facts);
             dropped && tokens > facts.prompt_tokens) {
    count -= dropped;
    if (computed < facts.prompt_tokens) count = std::max(count, facts.prompt_tokens);
  }
  return ceil_div(count, group.page_tokens);
}

int64_t kept_from(const Rules& group, const Facts& facts, int64_t computed) {
  if (group.is_window()) return group.kept_start(computed) / group.page_tokens;
  if (group.kind == Kind::kFull) return facts.away_tokens / group.page_tokens;
  return group.kind == Kind::kVision ? consumed_pages(group, facts, computed) : 0;
}

int64_t kept_to(const Rules& group, const Facts& facts, int64_t computed) {
  return ceil_div(computed - dropped_tokens(group, facts), group.page_tokens);
}

int64_t resumed_from(const Rules& group, const Facts& facts, int64_t length) {
  if (group.is_window()) return group.active_start(length) / group.page_tokens;
  return kept_from(group, facts, length);
}

int64_t peak_pages(const Rules& group, const Facts& facts, int64_t until, int64_t chunk,
                   int64_t computed) {
  const int64_t whole =
      end_position(group, facts, until, computed) - kept_from(group, facts, computed);
  if (group.kind == Kind::kVision) return std::min(whole, pages_near(group, facts, until, chunk));
  const int64_t kept = group.most_kept_tokens(until);
  if (!group.is_window() || kept >= until) return whole;
  return std::min(whole, ceil_div(kept + chunk - 1, group.page_tokens) + 1);
}

int64_t demand_pages(const Rules& group, const Facts& facts, int64_t expected, int64_t held_end,
                     int64_t need) {
  int64_t rest = end_position(group, facts, expected, 0) - held_end;
  if (group.is_window())
    rest = std::min(rest, ceil_div(group.most_kept_tokens(expected), group.page_tokens) + 1);
  return std::max(need, rest);
}

Room room_of(const Rules& group, const Facts& facts, int64_t held_end, int64_t computed) {
  if (group.kind == Kind::kState) return {0, held_end >= group.slices ? kNever : 0};
  if (!group.counts_tokens()) return {0, image_room(group, facts, held_end)};
  const int64_t tokens = held_end * group.page_tokens;
  if (group.counts_images) return {0, mixed_room(facts, tokens)};
  if (group.holds_embeddings) return {0, embedding_room(facts, tokens)};
  const int64_t dropped = dropped_tokens(group, facts);
  if (!dropped) return {0, tokens};
  if (tokens >= facts.prompt_tokens) return {0, tokens + dropped};
  if (computed < facts.prompt_tokens) return {0, tokens};
  return {facts.prompt_tokens + 1, tokens + dropped};
}

}  // namespace kvell::memory
