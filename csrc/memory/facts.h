// What the core knows of a request beside its tokens: where the prompt ends, its images, and what
// is away (prefix/groups/facts.py).
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvell::memory {

template <class T>
struct Span {
  const T* data;
  int64_t size;
  const T& operator[](int64_t i) const { return data[i]; }
};
using Ints = Span<int32_t>;

struct Image {  // `tokens` of the text from `start` on stand for `image_tokens`
  int64_t start, tokens, image_tokens;

  int64_t end() const { return start + tokens; }
  // Of its first tokens, so many tell what it shows; others may tell of more than the image.
  int64_t content_tokens() const { return std::min(tokens, image_tokens); }
};

struct Facts {
  int64_t prompt_tokens = 0;
  std::vector<Image> images;
  // The first ones, whose pages in full attention groups another instance has.
  int64_t away_tokens = 0;

  // Does a prefix of so many tokens end inside an image?
  bool cuts_image(int64_t length) const {
    return std::any_of(images.begin(), images.end(), [length](const Image& image) {
      return image.start < length && length < image.end();
    });
  }
};

// `images`: rows of three numbers, one after the other.
inline Facts facts_of(int64_t num_tokens, std::optional<int64_t> prompt_tokens, Ints images) {
  Facts facts{prompt_tokens.value_or(num_tokens), {}, 0};
  int64_t before = 0;
  for (int64_t i = 0; i + 2 < images.size; i += 3) {
    const Image image{images[i], images[i + 1], images[i + 2]};
    if (image.start < before || image.end() > num_tokens ||
        std::min(image.tokens, image.image_tokens) < 1)
      throw std::invalid_argument("image at token " + std::to_string(image.start) +
                                  " overlaps, is empty or is outside");
    before = image.end();
    facts.images.push_back(image);
  }
  return facts;
}

}  // namespace kvell::memory
