// How a product is cut into shares of a team.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace kvell {

constexpr int64_t kShareBytes = 64 << 10;     // of weights, at least, in one share
constexpr int64_t kMostShareBytes = 1 << 20;  // and at most: one run of memory, read in a row
constexpr int64_t kSharesEach = 6;            // for each thread then, so that all end alike
constexpr int64_t kLinePanels = 2;            // whose gated numbers of a row share a line of bf16

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Panels of a matrix in one share: many where memory bounds a product, which is quicker to read
// in long runs than in pieces that threads take in turn; else few, so that all end alike, but no
// line that two threads would write.
inline int64_t panels_of_share(const Matrix& matrix, int64_t rows, const Pace& pace, int threads) {
  const bool reads = rows <= pace.reading_rows;
  const int64_t even =
      reads ? matrix.panels() * matrix.panel_bytes() / (threads * kSharesEach) : kShareBytes;
  const int64_t bytes = std::clamp(even, kShareBytes, kMostShareBytes);
  const int64_t panels = std::max<int64_t>(1, bytes / matrix.panel_bytes());
  return reads ? panels : up(panels, kLinePanels) * kLinePanels;
}

// How a product is cut into shares: blocks of rows, in each of them chunks of panels.
struct Cut {
  int64_t block_rows, chunk_panels, chunks, shares;

  Cut(const Product& product, const Pace& pace, int threads) {
    const Matrix& matrix = *product.matrix;
    const int64_t passes = pace.shared_rows_bytes / (matrix.steps * 4 * pace.pass_rows);
    const int64_t most = std::max<int64_t>(1, passes) * pace.pass_rows;
    block_rows = up(product.rows, up(product.rows, most));
    chunk_panels = panels_of_share(matrix, product.rows, pace, threads);
    chunks = up(matrix.panels(), chunk_panels);
    shares = chunks * up(product.rows, block_rows);
  }
};

}  // namespace kvell
