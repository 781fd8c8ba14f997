"""Microseconds of processor time that one lookup over pool and buffer takes.

Run from the repository's root: ``python -m bench.mempool.lookup``.  Of each text the first half is
in the pool and the second half in the buffer.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench import result_file
from bench.mempool.shapes import SHAPES
from bench.mempool.timing import text_of
from bench.replay.shapes import layout_of, read_shape
from kvell.cost.swap_rule import BytesPerToken
from kvell.elastic.page_buffer import PageBuffer
from kvell.memory import Layout, Tokens, VisibleCore, create_core
from kvell.mempool.tiers.buffered import BufferedPages, needed
from kvell.mempool.tiers.digests import PrefixDigests
from kvell.mempool.tiers.lookup import SERVED_KINDS, Tiers
from kvell.vocabulary import GIB

TEXT_TOKENS = (1024, 4096, 16384)
TABLE_BYTES = 24 * GIB
"""Of pool and buffer each; only their tables are made."""
COPY_ALL = BytesPerToken(1e12)
"""Copying is always quicker."""


def cached(layout: Layout, text: Tokens) -> VisibleCore:
    """A pool that caches a text."""
    core = create_core(layout)
    core.begin_step(1)
    handle = core.open(text, "")
    core.claim(handle, len(text))
    one, until = np.asarray([handle], np.int32), np.asarray([len(text)], np.int32)
    served, _ = core.grow(one, until)
    assert served == 1, "the pool is too small for half a text"
    core.advance(one, until)
    core.close(handle)
    return core


def buffered(layout: Layout, asked: Tokens, begin: int, end: int) -> BufferedPages:
    """A buffer with the pages that a request needs at ``end``, of tokens after ``begin``."""
    pages = BufferedPages(layout.groups, PageBuffer(layout.groups, layout.num_large_pages))
    digests = PrefixDigests(asked, "")
    for index, group in enumerate(layout.groups):
        for _, place in needed(group, end):
            if place[0] > begin:
                assert pages.put(index, place, digests) is not None, "the buffer is too small"
    return pages


def looked_up(layout: Layout, num_tokens: int, rounds: int) -> dict[str, float]:
    """Medians: the core's query, a lookup the first time and again, one of a foreign text."""
    text = text_of(1, num_tokens)
    asked, other = np.append(text, np.int32(7)), text_of(2, num_tokens)
    core = cached(layout, text[: num_tokens // 2])
    pages = buffered(layout, asked, num_tokens // 2, num_tokens)
    own = range(len(layout.groups))

    def found(tokens: Tokens, digests: PrefixDigests) -> int:
        known = core.known(tokens, "")
        return Tiers(pages, own, digests, known).best(0, COPY_ALL)

    def median(call: Callable[[], object]) -> float:
        times = []
        for _ in range(rounds):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        return statistics.median(times) * 1e6

    kept = PrefixDigests(asked, "")
    assert found(asked, kept) == num_tokens
    return {
        "known_us": median(lambda: core.known(asked, "")),
        "first_us": median(lambda: found(asked, PrefixDigests(asked, ""))),
        "again_us": median(lambda: found(asked, kept)),
        "foreign_us": median(lambda: found(other, PrefixDigests(other, ""))),
    }


def main() -> None:
    """Measure every shape that a buffer serves and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        layout = layout_of(read_shape(shape), TABLE_BYTES)
        if any(group.kind not in SERVED_KINDS for group in layout.groups):
            continue
        figures[shape] = {}
        for num_tokens in TEXT_TOKENS:
            told = looked_up(layout, num_tokens, options.rounds)
            figures[shape][str(num_tokens)] = told
            print(shape, num_tokens, {name: f"{value:.3g}" for name, value in told.items()})
    if options.json:
        result_file.write(options.json, figures)


if __name__ == "__main__":
    main()
