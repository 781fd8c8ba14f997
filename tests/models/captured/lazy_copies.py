"""Page copies that a device of the tests makes in its own order, as the stream of a GPU does."""

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from typing_extensions import override

from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.engine.running.copies.page_mover import PageMover, Piece
from kvell.engine.running.recorded.starting import StartingModelRunner
from tests.engine.copying import copier_of
from tests.models.captured.fake_graphs import FakeGraphs
from tests.models.captured.served import Served


class LazyMover(PageMover):
    """A mover whose copies are work of the device.

    :ivar behind_a_step: copies that were ordered before the previous step had run, by kind.
    """

    def __init__(self, graphs: FakeGraphs, mover: PageMover) -> None:
        super().__init__(mover.layout, mover.slots, mover.pool, mover.buffer)
        self.behind_a_step = Counter[str]()
        self._ordered = 0
        self.graphs = graphs

    @override
    def offload(self, rows: NewPages) -> None:
        self._note("out", len(rows))
        super().offload(rows)

    @override
    def fetch(self, rows: NewPages) -> None:
        self._note("in", len(rows))
        super().fetch(rows)

    @override
    def copy(self, copies: Sequence[PageCopy]) -> None:
        self._note("within", len(copies))
        super().copy(copies)

    @override
    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self._ordered += 1
        self.graphs.run(partial(self._made, piece, source, target))

    def _made(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self._ordered -= 1
        super().move(piece, source, target)

    def _note(self, kind: str, count: int) -> None:
        self.behind_a_step[kind] += count * (self.graphs.num_waiting > self._ordered)


def let_copy(served: Served) -> LazyMover:
    """From now on the engine's device makes page copies, in order with its steps."""
    runner = served.engine.runner
    copier = copier_of(runner)
    assert isinstance(runner, StartingModelRunner) and served.graphs is not None
    copier.mover = lazy = mover(served.graphs, copier.mover)
    runner._follow = lambda: None  # type: ignore[method-assign] # no copy is the host's any more
    return lazy
