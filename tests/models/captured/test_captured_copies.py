"""A device copies pages in its own order while the host plans ahead: answers stay the same."""

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from kvell.engine.core.journal import Journal
from kvell.engine.requests.plan import NewPages, PageCopy
from kvell.engine.running.copies.page_mover import PageMover, Piece
from kvell.engine.running.recorded.starting import StartingModelRunner
from kvell.vocabulary import KIB
from tests.depth import few, scaled
from tests.engine.copying import copier_of
from tests.models.captured.fake_graphs import FakeGraphs
from tests.models.captured.served import Coming, Served


class LazyMover(PageMover):
    """A mover whose copies are work of the device.

    :ivar behind_a_step: copies that were ordered before the previous step had run, by kind.
    """

    def __init__(self, graphs: FakeGraphs, mover: PageMover) -> None:
        super().__init__(mover.layout, mover.pool, mover.buffer)
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
        self.move_later(piece, source, target)

    move_now = PageMover.move

    def move_later(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        """Let the device copy after the steps before it."""
        self._ordered += 1
        self.graphs.run(partial(self._made, piece, source, target))

    def _made(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self._ordered -= 1
        self.move_now(piece, source, target)

    def _note(self, kind: str, count: int) -> None:
        self.behind_a_step[kind] += count * (self.graphs.num_waiting > self._ordered)


class ReadWhenOrdered(LazyMover):
    """A fault: the host reads a page that the step before has yet to write."""

    @override
    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self.move_later(piece, source.clone(), target)


class MadeWhenOrdered(LazyMover):
    """A fault: the host copies pages that the device still reads, or has yet to write."""

    @override
    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self.move_now(piece, source, target)


class BufferWrittenWhenOrdered(LazyMover):
    """A fault: pinned memory is overwritten before the device has copied it in."""

    @override
    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        if target is self.buffer:
            self.move_now(piece, source, target)
        else:
            self.move_later(piece, source, target)


class MadeLate(LazyMover):
    """A fault: the device copies in another order of work, for which its step does not wait."""

    @override
    def move(self, piece: Piece, source: torch.Tensor, target: torch.Tensor) -> None:
        self.graphs.run(partial(self.move_later, piece, source, target))


def let_copy(served: Served, mover: type[LazyMover] = LazyMover) -> LazyMover:
    """From now on the engine's device makes page copies, in order with its steps."""
    runner = served.engine.runner
    copier = copier_of(runner)
    assert isinstance(runner, StartingModelRunner) and served.graphs is not None
    copier.mover = lazy = mover(served.graphs, copier.mover)
    runner._follow = lambda: None  # type: ignore[method-assign] # no copy is the host's any more
    return lazy


LLAMA, GEMMA, FALCON = "LlamaForCausalLM", "Gemma3ForCausalLM", "FalconH1ForCausalLM"
POOL_BYTES = {LLAMA: 60 * KIB, GEMMA: 100 * KIB, FALCON: 72 * KIB}
"""Pools of five or six large pages, for one long request and a short one."""
BUFFER_BYTES = 96 * KIB
MAX_MODEL_LEN = 48

PREFIXES = (
    Coming(10, shared=16, own=8, outputs=3),
    Coming(5, shared=16, own=12, outputs=3),
    Coming(0, shared=16, own=12, outputs=7),
    Coming(2, shared=24, own=5, outputs=3),
    Coming(2, shared=24, own=11, outputs=5),
    Coming(6, shared=24, own=3, outputs=2),
)
"""Prefixes leave the pool for the buffer, come back, and make room there for others."""
STATES = (
    Coming(4, shared=0, own=7, outputs=6),
    Coming(1, shared=0, own=7, outputs=7),
    Coming(5, shared=0, own=3, outputs=4),
)
"""A state is copied while the step before has yet to change it."""
COMING = st.builds(
    Coming,
    st.integers(0, 12),
    shared=st.sampled_from([0, 16, 24]),
    own=st.integers(1, 12),
    outputs=st.integers(1, 9),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 1.0]),
)
Requests = tuple[Coming, ...]


def served(architecture: str, graphs: FakeGraphs | None) -> Served:
    kv_bytes = POOL_BYTES[architecture]
    return Served(architecture, graphs, 1, kv_bytes, BUFFER_BYTES, MAX_MODEL_LEN)


@cache
def in_turn(architecture: str, requests: Requests) -> Journal:
    engine = served(architecture, None)
    engine.serve(requests)
    return engine.journal


def copied(
    architecture: str,
    requests: Requests,
    chance: Random | None = None,
    mover: type[LazyMover] = LazyMover,
) -> LazyMover:
    """Serve requests, and check answers and plans; return the mover."""
    engine = served(architecture, FakeGraphs(chance))
    copies = let_copy(engine, mover)
    engine.serve(requests)
    assert engine.journal.entries == in_turn(architecture, requests).entries
    return copies


@given(
    st.sampled_from([LLAMA, FALCON]),
    st.lists(COMING, min_size=2, max_size=6).map(tuple),
    st.one_of(st.none(), st.integers(0, 99)),
)
@settings(few(), max_examples=scaled(10))
def test_answers_are_those_of_steps_in_turn(
    architecture: str, requests: Requests, seed: int | None
) -> None:
    """:param seed: of moments at which the device works unasked; None: there are none."""
    copied(architecture, requests, None if seed is None else Random(seed))


@pytest.mark.parametrize(
    ("architecture", "requests", "kinds"),
    [
        (LLAMA, PREFIXES, {"out", "in", "within"}),
        (FALCON, STATES, {"within"}),
        pytest.param(GEMMA, PREFIXES, {"out"}, marks=pytest.mark.long),
    ],
)
def test_copies_are_ordered_while_the_step_before_has_not_run(
    architecture: str, requests: Requests, kinds: set[str]
) -> None:
    assert set(+copied(architecture, requests).behind_a_step) >= kinds


@pytest.mark.parametrize(
    ("mover", "architecture", "requests"),
    [
        (ReadWhenOrdered, FALCON, STATES),
        (MadeWhenOrdered, FALCON, STATES),
        (BufferWrittenWhenOrdered, LLAMA, PREFIXES),
        (MadeLate, LLAMA, PREFIXES),
    ],
)
def test_copies_out_of_order_change_answers(
    mover: type[LazyMover], architecture: str, requests: Requests
) -> None:
    with pytest.raises(AssertionError):
        copied(architecture, requests, None, mover)
