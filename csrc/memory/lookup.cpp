#include "lookup.h"

#include <algorithm>

namespace kvell::memory {

int64_t Lookup::match(Ints tokens, const std::string& root, const Model& model,
                      const Facts& facts) {
  store_.tree.match(root, {tokens.data, 0, tokens.size}, model, path_);
  hits_.read(model, path_, facts);
  return hits_.longest(std::min(path_.length, tokens.size - 1));
}

std::vector<int64_t> Lookup::reach(Ints tokens, const std::string& root, const Model& model,
                                   const Facts& facts) {
  match(tokens, root, model, facts);
  const int64_t known = std::max<int64_t>(0, std::min(path_.length, tokens.size - 1));
  std::vector<int64_t> lengths(store_.groups.size(), -1);
  for (const int32_t g : model.own) {
    const Rules& group = store_.groups[g];
    Model alone = model;
    alone.own = {g};
    alone.hit_alignment = group.counts_tokens() ? group.page_tokens : 1;
    hits_.read(alone, path_, facts);
    lengths[g] = group.required_for_hit ? hits_.longest(known) : known;
  }
  return lengths;
}

void Lookup::known(Ints tokens, const std::string& root, const Model& model,
                   std::vector<std::array<int32_t, 4>>& rows) {
  store_.tree.match(root, {tokens.data, 0, tokens.size}, model, path_);
  for (const int32_t g : model.own) {
    const Rules& group = store_.groups[g];
    const bool is_state = group.kind == Kind::kState;
    if (!is_state && !group.counts_tokens()) continue;
    const Found& found = path_.found[g];
    const auto add = [&](int64_t position, int32_t slot, int64_t end) {
      if (slot != kNoPage && end <= path_.length)
        rows.push_back({g, int32_t(position), store_.pool.page_of(g, slot), int32_t(end)});
    };
    for (size_t p = 0; p < found.whole.size(); ++p)
      add(int64_t(p), found.whole[p], (int64_t(p) + 1) * group.page_tokens);
    for (const Mark* mark : found.marks)
      for (size_t part = 0; part < mark->slots.size(); ++part)
        add(is_state ? int64_t(part) : mark->end / group.page_tokens, mark->slots[part], mark->end);
  }
  std::sort(rows.begin(), rows.end());
}

void Lookup::resume(Holder& h, int32_t g, int64_t length, Ints tokens) {
  const Rules& group = store_.groups[g];
  GroupPages& held = h.groups[g];
  held.first = resumed_from(group, h.facts, length);
  if (group.kind == Kind::kState) {
    if (length && hits_.resumes(g, length))
      for (int32_t part = 0; part < group.slices; ++part)
        copy(h, g, held.first + part, length, hits_.page_at(g, length, part));
  } else if (group.kind == Kind::kCross) {
    resume_images(h, g, length);
  } else if (group.kind == Kind::kVision) {
    resume_embeddings(h, g, length, tokens);
  } else {
    resume_tokens(h, g, length);
  }
  for (const int32_t slot : held.slots) store_.pool.acquire(slot);
  held.published = held.end();
}

void Lookup::resume_images(Holder& h, int32_t g, int64_t length) {
  if (!hits_.resumes(g, length)) return;
  for (const Image& image : h.facts.images) {
    if (image.end() > length) return;
    const int64_t pages = image_pages(store_.groups[g], image);
    for (int64_t part = 0; part < pages; ++part)
      h.groups[g].slots.tail().push_back(hits_.page_at(g, image.end(), part));
  }
}

// Those of the next images, up to the first of which a page is missing.
void Lookup::resume_embeddings(Holder& h, int32_t g, int64_t length, Ints tokens) {
  for (const Image& image : h.facts.images) {
    if (image.start < length) continue;
    const int64_t told = image.content_tokens();
    const Tokens content{tokens.data + image.start, 0, told};
    const int32_t node = store_.tree.find(h.images_root, content);
    if (!node) return;
    std::vector<int32_t> slots;
    for (int64_t part = 0; part < image_pages(store_.groups[g], image); ++part) {
      slots.push_back(store_.tree.page_at(node, g, told, int32_t(part)));
      if (slots.back() == kNoPage) return;
    }
    std::vector<int32_t>& held = h.groups[g].slots.tail();
    held.insert(held.end(), slots.begin(), slots.end());
  }
}

void Lookup::resume_tokens(Holder& h, int32_t g, int64_t length) {
  const Rules& group = store_.groups[g];
  const std::vector<int32_t>& whole = path_.found[g].whole;
  GroupPages& held = h.groups[g];
  const int64_t size = group.page_tokens, end = length / size;
  if (!hits_.resumes(g, length)) {
    const int64_t run = group.is_window() ? 0 : hits_.whole_run(g, length);
    held.slots.assign(whole.data(), whole.data() + run);
    return;
  }
  if (dropped_tokens(group, h.facts)) {
    for (int64_t p = held.first; p < end; ++p) copy(h, g, p, (p + 1) * size, whole[p]);
  } else if (held.first < end) {
    held.slots.assign(whole.data() + held.first, whole.data() + end);
  }
  if (length % size) copy(h, g, end, length, hits_.tail_page(g, length));
}

void Lookup::copy(Holder& h, int32_t g, int64_t position, int64_t length, int32_t slot) {
  store_.pool.acquire(slot);
  h.sources.push_back({g, slot, position, length});
}

}  // namespace kvell::memory
