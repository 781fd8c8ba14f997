#include "hits.h"

namespace kvell::memory {
namespace {

void count_runs(const std::vector<int32_t>& pages, std::vector<int32_t>& runs) {
  runs.resize(pages.size());
  int32_t run = 0;
  for (size_t i = 0; i < pages.size(); ++i) runs[i] = run = pages[i] == kNoPage ? 0 : run + 1;
}

}  // namespace

void Hits::read(const Model& model, const Path& path, const Facts& facts) {
  model_ = &model;
  path_ = &path;
  facts_ = &facts;
  scans_.resize(groups_.size());
  for (const int32_t g : model.own) scan(g);
}

void Hits::scan(int32_t g) {
  const Rules& group = groups_[g];
  Scan& scan = scans_[g];
  const std::vector<int32_t>& whole = found(g).whole;
  scan.first_hole = std::find(whole.begin(), whole.end(), kNoPage) - whole.begin();
  if (group.is_window()) count_runs(whole, scan.runs);
  scan.images_to = kNever;
  if (group.kind != Kind::kCross) return;
  for (const Image& image : facts_->images) {
    const int64_t pages = image_pages(group, image);
    for (int64_t part = 0; part < pages; ++part)
      if (page_at(g, image.end(), part) == kNoPage) {
        scan.images_to = image.end();
        return;
      }
  }
}

int64_t Hits::longest(int64_t limit) {
  int32_t state = -1;
  for (const int32_t g : model_->own) {
    const Rules& group = groups_[g];
    if (!group.required_for_hit) continue;
    if (dropped_tokens(group, *facts_)) limit = std::min(limit, facts_->prompt_tokens - 1);
    if (group.kind == Kind::kFull || group.kind == Kind::kDropping)
      limit = std::min(limit, (scans_[g].first_hole + 1) * group.page_tokens - 1);
    if (group.kind == Kind::kState && state < 0) state = g;
  }
  if (limit <= 0) return 0;
  return state >= 0 ? longest_state(state, limit) : longest_tokens(limit);
}

// Only where a state was kept.
int64_t Hits::longest_state(int32_t state, int64_t limit) const {
  const auto& marks = found(state).marks;
  for (size_t i = marks.size(); i-- > 0;) {
    const int64_t end = marks[i]->end;
    if (end <= limit && all_resume(end)) return end;
  }
  return 0;
}

// At the limit, where pages end in every group, where a request ended, around images.
int64_t Hits::longest_tokens(int64_t limit) {
  collect_lengths(limit);
  const int64_t step = model_->hit_alignment;
  int64_t aligned = limit / step * step;
  size_t left = lengths_.size();
  while (aligned > 0 || left) {
    const int64_t length = std::max<int64_t>(aligned, left ? lengths_[left - 1] : 0);
    if (length == aligned) aligned -= step;
    while (left && lengths_[left - 1] == length) --left;
    if (all_resume(length)) return length;
  }
  return 0;
}

void Hits::collect_lengths(int64_t limit) {
  lengths_.clear();
  for (const int32_t g : model_->own) {
    if (!groups_[g].required_for_hit || !groups_[g].counts_tokens()) continue;
    for (const Mark* mark : found(g).marks)
      if (mark->end <= limit) lengths_.push_back(mark->end);
  }
  lengths_.push_back(int32_t(limit));
  for (const int32_t g : model_->own) {
    const Rules& group = groups_[g];
    if (group.required_for_hit && group.kind == Kind::kFull && whole_run(g, limit))
      lengths_.push_back(int32_t(whole_run(g, limit) * group.page_tokens));
  }
  for (const Image& image : facts_->images)
    for (const int64_t edge : {image.start, image.end()})
      if (0 < edge && edge <= limit) lengths_.push_back(int32_t(edge));
  std::sort(lengths_.begin(), lengths_.end());
}

bool Hits::all_resume(int64_t length) const {
  for (const int32_t g : model_->own)
    if (groups_[g].required_for_hit && !resumes(g, length)) return false;
  return !facts_->cuts_image(length);
}

bool Hits::resumes(int32_t g, int64_t length) const {
  const Rules& group = groups_[g];
  if (group.kind == Kind::kState) {
    const auto at = found(g).from(length);
    return at != found(g).marks.end() && (*at)->end == length && (*at)->count == group.slices;
  }
  const Scan& scan = scans_[g];
  if (group.kind == Kind::kCross) return length < scan.images_to;
  if (group.counts_images && !facts_->images.empty()) return false;
  const int64_t stop = length / group.page_tokens;
  if (group.is_window()) {
    const int64_t needed = stop - resumed_from(group, *facts_, length);
    if (needed > 0 && (stop > int64_t(scan.runs.size()) || scan.runs[stop - 1] < needed))
      return false;
  } else if (stop > scan.first_hole) {
    return false;
  }
  return length % group.page_tokens == 0 || tail_page(g, length) != kNoPage;
}

int32_t Hits::tail_page(int32_t g, int64_t length) const {
  const int64_t size = groups_[g].page_tokens, position = length / size;
  const Found& pages = found(g);
  if (position < int64_t(pages.whole.size()) && pages.whole[position] != kNoPage)
    return pages.whole[position];
  const auto at = pages.from(length);
  return at != pages.marks.end() && (*at)->end < (position + 1) * size ? (*at)->at(0) : kNoPage;
}

int32_t Hits::page_at(int32_t g, int64_t end, int64_t part) const {
  const auto at = found(g).from(end);
  return at != found(g).marks.end() && (*at)->end == end ? (*at)->at(part) : kNoPage;
}

}  // namespace kvell::memory
