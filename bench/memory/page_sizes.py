"""The large page of real models, and the waste of other choices.

See README.md beside this file.  Pure arithmetic of the memory core: no memory is touched.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench import result_file
from kvell.memory import (
    GroupKind,
    GroupSpec,
    LayerSpec,
    Layout,
    large_pages_needed,
    plan_layout,
    policy_of,
)
from kvell.vocabulary import GIB, KIB, MIB

CHUNK_BYTES = 2 * MIB
BF16_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model's attention; every ``full_every``-th layer is full, the others slide."""

    name: str
    layers: int
    full_every: int
    kv_heads: int
    head_size: int
    window_tokens: int

    def specs(self) -> list[LayerSpec]:
        """Specs of its layers, in bf16."""
        return [self._spec(i, (i + 1) % self.full_every == 0) for i in range(self.layers)]

    def _spec(self, index: int, full: bool) -> LayerSpec:
        kind = GroupKind.FULL if full else GroupKind.SLIDING
        window_tokens = 0 if full else self.window_tokens
        return LayerSpec(index, kind, self.kv_heads, self.head_size, BF16_BYTES, window_tokens)


SHAPES = (
    Shape("llama3-8b", 32, 1, 8, 128, 0),
    Shape("gemma3-270m", 18, 6, 1, 256, 512),
    Shape("gemma3-27b", 62, 6, 16, 128, 1024),
    Shape("ministral-8b", 36, 4, 8, 128, 32768),
    Shape("gpt-oss-20b", 24, 2, 8, 64, 128),
)


@dataclass(frozen=True)
class Sizes:
    """The large page of one shape.

    Fractions: ``padding`` of the worst page; ``chunk_tied`` of the pool, if every large page had
    to be whole chunks, or every chunk whole large pages.
    """

    shape: str
    rule: str
    large_page_bytes: int
    page_bytes: tuple[int, ...]
    pages_per_large: tuple[int, ...]
    padding: float
    chunk_tied: float
    gcd_pieces: tuple[int, ...]


@dataclass(frozen=True)
class Waste:
    """Fractions of the allocated bytes that hold no token a later step may read.

    :param lcm: pages by group in large pages, as Kvell has them.
    :param paged: one page size for all layers, all of which hold all tokens.
    :param max_page: every group has the largest group's page and the same page_tokens.
    :param max_page_filled: the same, with as many tokens in a page as fit.
    """

    shape: str
    tokens: int
    requests: int
    needed_bytes: int
    lcm: float
    paged: float
    max_page: float
    max_page_filled: float


def sizes_of(shape: Shape, pool_bytes: int) -> Sizes:
    """The large page by the sizing rule, and the waste if it were tied to chunks."""
    layout = plan_layout(shape.specs(), pool_bytes)
    page_bytes = tuple(group.page_bytes for group in layout.groups)
    gcd = math.gcd(*page_bytes)
    return Sizes(
        shape.name,
        layout.sizing_rule,
        layout.large_page_bytes,
        page_bytes,
        tuple(group.pages_per_large for group in layout.groups),
        max(group.padding_bytes / group.page_stride_bytes for group in layout.groups),
        chunk_tied_waste(layout.large_page_bytes),
        tuple(size // gcd for size in page_bytes),
    )


def chunk_tied_waste(large_page_bytes: int) -> float:
    """Part of each chunk left over when large pages may not straddle chunks."""
    chunks = -(-large_page_bytes // CHUNK_BYTES)
    whole = chunks * CHUNK_BYTES // large_page_bytes
    return 1 - whole * large_page_bytes / (chunks * CHUNK_BYTES)


def waste_of(shape: Shape, pool_bytes: int, tokens: int, requests: int) -> Waste:
    """Waste of each choice while ``requests`` requests of ``tokens`` tokens decode."""
    layout = plan_layout(shape.specs(), pool_bytes)
    needed_bytes = requests * sum(
        policy_of(group).live_tokens(tokens) * group.token_bytes for group in layout.groups
    )

    def waste(choice: Layout) -> float:
        large_pages = large_pages_needed(choice, tokens, requests)
        return 1 - needed_bytes / (large_pages * choice.large_page_bytes)

    return Waste(
        shape.name,
        tokens,
        requests,
        needed_bytes,
        waste(layout),
        waste(plan_layout(shape.specs(), pool_bytes, manager="paged")),
        waste(max_page_layout(layout, filled=False)),
        waste(max_page_layout(layout, filled=True)),
    )


def max_page_layout(layout: Layout, *, filled: bool) -> Layout:
    """Every group takes whole pages of the largest group's size (Jenga §4.4, MAX page)."""
    largest_bytes = max(group.page_bytes for group in layout.groups)

    def largest(group: GroupSpec) -> GroupSpec:
        times = largest_bytes // group.page_bytes if filled else 1
        return replace(
            group,
            page_tokens=group.page_tokens * times,
            page_stride_bytes=largest_bytes,
            pages_per_large=1,
        )

    groups = tuple(largest(group) for group in layout.groups)
    return Layout(groups, largest_bytes, layout.pool_bytes // largest_bytes, "max-page")


def sizes_line(sizes: Sizes) -> str:
    """One row of the first table."""
    pages = " + ".join(f"{size / KIB:g}" for size in sizes.page_bytes)
    counts = ":".join(map(str, sizes.pages_per_large))
    pieces = ":".join(map(str, sizes.gcd_pieces))
    return (
        f"{sizes.shape:13} {pages:>12} {sizes.large_page_bytes / KIB:11g} {counts:>6}"
        f" {sizes.rule:>13} {sizes.padding:8.1%} {sizes.chunk_tied:10.1%} {pieces:>7}"
    )


def waste_line(waste: Waste) -> str:
    """One row of the second table."""
    return (
        f"{waste.shape:13} {waste.tokens:7} {waste.requests:5} {waste.needed_bytes / MIB:10.1f}"
        f" {waste.lcm:7.1%} {waste.paged:7.1%} {waste.max_page:7.1%} {waste.max_page_filled:9.1%}"
    )


def show(sizes: Sequence[Sizes], wastes: Sequence[Waste]) -> None:
    """Print both tables."""
    print("shape         pages, KiB  large, KiB  count          rule  padding chunk-tied gcd cuts")
    for one in sizes:
        print(sizes_line(one))
    print("\nshape          tokens  reqs needed MiB     lcm   paged     max  max+fill")
    for each in wastes:
        print(waste_line(each))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool-gib", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1085, 20_000, 80_000])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print sizes per shape, then waste per shape, length and number of requests."""
    args = arguments()
    pool_bytes = int(args.pool_gib * GIB)
    sizes = [sizes_of(shape, pool_bytes) for shape in SHAPES]
    wastes = [
        waste_of(shape, pool_bytes, tokens, requests)
        for shape in SHAPES
        for requests in args.requests
        for tokens in args.tokens
    ]
    show(sizes, wastes)
    if args.json:
        result = {
            "pool_bytes": pool_bytes,
            "sizes": [asdict(one) for one in sizes],
            "waste": [asdict(each) for each in wastes],
        }
        result_file.write(args.json, result, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
