// kvell.models.fused._packing: weights into the panels that the fused pass streams (csrc/forward/matrix.h).
//
// Rows come as addresses, which models/fused/packing.py made of tensors that it keeps alive; an
// address of 0 is a row of zeros. Numbers are rounded on their way as torch rounds them: to the
// nearest, ties to even. Python's lock is released and several threads share the panels, so that
// a start reads a mapped file once, and writes what is served.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/bfloat16.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr int64_t kPanel = 32;
constexpr int64_t kBlock = 16;      // items that are written side by side: they stay in the cache
constexpr int64_t kSharePanels = 4; // that a thread takes at a time

struct Float32 {
  using Number = float;
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
};

struct Bfloat16 {
  using Number = uint16_t;
  static float wide(uint16_t x) { return bf16_value(x); }
  static uint16_t narrow(float x) { return bf16_of(x); }
};

struct Rows {
  const int64_t* addresses;
  int64_t count;
  int64_t width;  // numbers of a row
  int64_t items;  // that a row is packed to; numbers beyond its own are zero
};

// One row's items first … end-1; the next item of a row lies a panel's width further.
template <class From, class To>
void pack_row(const typename From::Number* from, int64_t first, int64_t end, int64_t width,
              typename To::Number* to) {
  using Number = typename To::Number;
  constexpr int64_t numbers = 4 / sizeof(Number), stride = kPanel * numbers;
  const int64_t whole = from ? std::max(first, std::min(end, width / numbers)) : first;
  for (int64_t item = first; item < whole; ++item)
    for (int64_t i = 0; i < numbers; ++i)
      to[item * stride + i] = To::narrow(From::wide(from[item * numbers + i]));
  for (int64_t item = whole; item < end; ++item)
    for (int64_t i = 0; i < numbers; ++i) {
      const int64_t at = item * numbers + i;
      to[item * stride + i] = from && at < width ? To::narrow(From::wide(from[at])) : Number(0);
    }
}

template <class From, class To>
void pack_panel(const Rows& rows, int64_t panel, typename To::Number* out) {
  constexpr int64_t numbers = 4 / sizeof(typename To::Number);
  for (int64_t first = 0; first < rows.items; first += kBlock) {
    const int64_t end = std::min(rows.items, first + kBlock);
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t row = panel * kPanel + lane;
      const int64_t address = row < rows.count ? rows.addresses[row] : 0;
      pack_row<From, To>(reinterpret_cast<const typename From::Number*>(address), first, end,
                         rows.width, out + lane * numbers);
    }
  }
}

template <class From, class To>
void pack(const Rows& rows, void* out, int threads) {
  const int64_t panels = (rows.count + kPanel - 1) / kPanel;
  std::atomic<int64_t> taken{0};
  const auto work = [&] {
    for (int64_t first; (first = taken.fetch_add(kSharePanels)) < panels;)
      for (int64_t panel = first; panel < std::min(panels, first + kSharePanels); ++panel)
        pack_panel<From, To>(rows, panel,
                             static_cast<typename To::Number*>(out) +
                                 panel * kPanel * rows.items * (4 / sizeof(typename To::Number)));
  };
  std::vector<std::thread> others;
  const int64_t shares = (panels + kSharePanels - 1) / kSharePanels;
  for (int64_t i = 1; i < std::min<int64_t>(threads, shares); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

// elements: 0 is float32, 1 is bfloat16; of the rows, and of what is packed.
void pack_rows(uintptr_t addresses, int64_t count, int64_t width, int64_t items, int from, int to,
               uintptr_t out, int threads) {
  if (count < 0 || width < 0 || items * (to ? 2 : 1) < width)
    throw std::invalid_argument("pack_rows: rows are wider than what they are packed to");
  if (from < 0 || from > 1 || to < 0 || to > 1)
    throw std::invalid_argument("pack_rows: no such element");
  const Rows rows{reinterpret_cast<const int64_t*>(addresses), count, width, items};
  void* const there = reinterpret_cast<void*>(out);
  nb::gil_scoped_release release;
  if (from && to) return pack<Bfloat16, Bfloat16>(rows, there, threads);
  if (from) return pack<Bfloat16, Float32>(rows, there, threads);
  if (to) return pack<Float32, Bfloat16>(rows, there, threads);
  return pack<Float32, Float32>(rows, there, threads);
}

}  // namespace

NB_MODULE(_packing, m) {
  m.doc() = "Weights into panels. Use kvell.models.fused.packing.";
  m.def("pack_rows", &pack_rows, "addresses"_a, "count"_a, "width"_a, "items"_a, "source"_a, "target"_a,
        "out"_a, "threads"_a);
}
