// kvell.attention.triton._items: a step's work for captured attention, for callers that hold the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "items.h"
#include "python/arrays.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvell::batching {
namespace {

// The number of items precedes them, padded to 16 bytes.
constexpr int64_t kHeaderInts = 4;

// tile_tokens, section_tokens, page_tokens, window_tokens, chunk_tokens
using TilingArgs = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;
// items, tiles, tile_tokens
using CapacityArgs = std::tuple<int64_t, int64_t, int64_t>;
using WrittenInts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t write_items(nb::handle query_starts, nb::handle context_lens, nb::handle table_starts,
                    nb::handle first_positions, const TilingArgs& tiling_args,
                    const CapacityArgs& capacity_args, const WrittenInts& into) {
  const IntsArgument starts(query_starts), contexts(context_lens), tables(table_starts),
      firsts(first_positions);
  const auto& [tile_tokens, section, page, window, chunk] = tiling_args;
  const auto& [items, tiles, most_tokens] = capacity_args;
  if (tile_tokens < 1 || section < 1 || page < 1 || window < 0 || chunk < 0)
    throw nb::value_error("tiling: sizes must be positive");
  if (int64_t(into.size()) < kHeaderInts + items * kItemInts)
    throw nb::value_error("into: shorter than its capacity");
  const Lengths lengths{starts.ints(), contexts.ints(), tables.ints(), firsts.ints()};
  int32_t* const written = into.data();
  const int64_t count = short_items(lengths, {tile_tokens, section, page, window, chunk},
                                    {items, tiles, most_tokens}, written + kHeaderInts);
  written[0] = int32_t(count);
  return count;
}

}  // namespace
}  // namespace kvell::batching

NB_MODULE(_items, m) {
  m.doc() = "Sections of short tiles, compiled. Use kvell.attention.triton.filling.";
  m.def("write_items", &kvell::batching::write_items, "query_starts"_a, "context_lens"_a,
        "table_starts"_a, "first_positions"_a, "tiling"_a, "capacity"_a, "into"_a);
}
