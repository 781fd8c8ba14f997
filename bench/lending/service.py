"""Decode speed with half of a context at a creditor's service, as a share of the local speed.

Run from the repository's root: ``python -m bench.lending.service``.  See README.md beside this
file.
"""

import argparse
import statistics
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console

from bench import machine
from kvell.attention.interface import GroupBatch
from kvell.attention.native import NativeKernels
from kvell.cli.terminal.environment import process_cache_dir
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.models.loading.loading import load_paged_model
from kvell.models.partials import _partials
from kvell.models.partials.attention_service import AttentionService
from kvell.models.partials.remote_sections import RemoteSections, SectionRun
from kvell.models.sources.packaged import packaged_model
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.vocabulary import SECTION_TOKENS

PAGE_TOKENS = 16
SECTION_PAGES = SECTION_TOKENS // PAGE_TOKENS
ROOM_BYTES = 1 << 20
PATIENCE_SECONDS = 10.0
DEBTOR = 0


@dataclass(frozen=True)
class Speeds:
    """Seconds of decode steps, the median of each round, and whether logits were the same bits."""

    local_seconds: list[float]
    lent_seconds: list[float]
    is_equal: bool

    @property
    def shares(self) -> list[float]:
        """Speed as a share of the local one, of each round."""
        return [a / b for a, b in zip(self.local_seconds, self.lent_seconds, strict=True)]


class ThreadLine:
    """The way to a service of this process, which answers on a thread of its own."""

    def __init__(self, service: AttentionService) -> None:
        self._service = service
        self._thread = ThreadPoolExecutor(1)
        self._answers: deque[Future[bytes]] = deque()

    def post(self, query: bytes) -> bool:
        """Begin to answer a query."""
        self._answers.append(self._thread.submit(self._service.answer, DEBTOR, query))
        return True

    def take(self, seconds: float) -> bytes | None:
        """Return the oldest answer that was not taken, or None if it does not come in time."""
        try:
            return self._answers.popleft().result(seconds)
        except TimeoutError:
            return None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


class Halves:
    """One model, whose request's keys and values lie in its pool, and half of them in another's."""

    def __init__(self, dtype: torch.dtype, sections: int, threads: int, by_modules: bool) -> None:
        path = packaged_model(process_cache_dir())
        self.model = load_paged_model(path, NativeKernels(threads), dtype, fused=not by_modules)
        layers = self.model.description.layers
        token_bytes = layers[0].token_bytes
        stride = PAGE_TOKENS * token_bytes * len(layers)
        indices = tuple(layer.index for layer in layers)
        group = GroupSpec("full", GroupKind.FULL, indices, token_bytes, PAGE_TOKENS, stride, 1)
        pages = sections * SECTION_PAGES + 1
        layout = Layout((group,), stride, pages)
        drawn = torch.randn(layout.pool_bytes // dtype.itemsize, dtype=dtype)
        pool = drawn.view(torch.uint8)
        self.model.attach(layout, pool)
        own, copied = self.model.served_layers, pool.clone()
        assert own is not None
        lent = (replace(layer, pages=replace(layer.pages, pool=copied)) for layer in own.layers)
        served = replace(own, layers=tuple(lent))
        away = sections // 2
        self.service = AttentionService(served, np.arange(away + 1, dtype=np.uint64))
        self.line = ThreadLine(self.service)
        for section in range(away):
            first = section * SECTION_PAGES
            self.service.lend(section + 1, DEBTOR, [range(first, first + SECTION_PAGES)])
        self._runs = [SectionRun(0, "creditor", 0, tuple(range(1, away + 1)))]
        self._elsewhere = RemoteSections(
            {"creditor": _partials.CalledCreditor(ROOM_BYTES, self.line.post, self.line.take)}
        )
        self._batches = [_decode(pages, first) for first in (0, away * SECTION_PAGES)]

    def logits(self, lent: bool) -> torch.Tensor:
        """Compute one decode step."""
        self.model.elsewhere = self._elsewhere if lent else None
        if lent:
            self._elsewhere.expect(self._runs, PATIENCE_SECONDS)
        found = self.model.forward(self._batches[lent])
        assert not self._elsewhere.lacking or not lent, "the creditor was too slow"
        return found

    def seconds(self, lent: bool, steps: int) -> float:
        """The median of some steps."""
        found = []
        for _ in range(steps):
            started = time.perf_counter()
            self.logits(lent)
            found.append(time.perf_counter() - started)
        return statistics.median(found)


def _decode(pages: int, first: int) -> ForwardBatch:
    """A decode step whose table begins at a page."""

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    context = (pages - 1) * PAGE_TOKENS + 1
    group = GroupBatch(
        ints(0, 1),
        ints(context),
        ints(0, pages - first),
        torch.arange(first, pages, dtype=torch.int32),
        ints(first),
        ints(pages - 1),
        ints(0),
    )
    one = torch.tensor([0])
    return ForwardBatch(torch.tensor([100]), torch.tensor([context - 1]), (group,), one)


def measured(halves: Halves, rounds: int, steps: int) -> Speeds:
    """Time both in turn."""
    equal = torch.equal(halves.logits(lent=False), halves.logits(lent=True))
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for lent in (False, True) if turn % 2 == 0 else (True, False):
            halves.seconds(lent, 2)  # caches hold what the other way read
            found[lent].append(halves.seconds(lent, steps))
    return Speeds(found[False], found[True], equal)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--modules", action="store_true", help="by transformers' modules")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    halves = Halves(torch.bfloat16, options.sections, options.threads, options.modules)
    try:
        found = measured(halves, options.rounds, options.steps)
    finally:
        halves.line.close()
    shares = found.shares
    console = Console(width=110)
    console.print(machine.describe())
    console.print(
        f"{options.sections // 2} of {options.sections} sections at the service: "
        f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f}) of the local "
        f"speed, {1e3 * statistics.median(found.local_seconds):.1f} ms a local step; "
        f"same bits: {found.is_equal}"
    )


if __name__ == "__main__":
    main()
