"""Copies to the CPU buffer and back in tests: damaged ones, and ones that wait to be let go."""

import threading
from collections.abc import Mapping, Sequence

from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.engine.running.copies.copies_under_pass import Copier, CopyCounts, StepCopies
from kvell.engine.running.copies.page_mover import PageMover, Piece
from kvell.engine.running.runner import ModelRunner, Runner
from kvell.pages.stages import Part

SOON_SECONDS = 60.0
"""Nothing in a test takes this long, unless somebody waits for ever."""


def copier_of(runner: Runner) -> Copier:
    assert isinstance(runner, ModelRunner)
    return runner.copier


def damage_buffer(runner: Runner) -> None:
    """From now on, whatever comes back from the buffer is wrong."""
    copier = copier_of(runner)
    begin, buffer = copier.begin, copier.mover.held

    def damaged(plan: StepPlan) -> StepCopies:
        buffer.fill_(1)
        return begin(plan)

    copier.begin = damaged  # type: ignore[method-assign]


class HeldUp:
    """A mover whose copies under a pass wait until they are let go, one stage after the other.

    A stage is let go when the pass has come to wait for it; ``held`` counts those.
    """

    def __init__(self, mover: PageMover) -> None:
        self.held = 0
        self.mover = mover
        self._may_go = threading.Semaphore(0)

    def let_go(self) -> None:
        self._may_go.release()

    def offload(self, rows: NewPages) -> None:
        self.mover.offload(rows)

    def fetch(self, rows: NewPages) -> None:
        self.mover.fetch(rows)

    def move_parts(
        self, pieces: Sequence[Piece], parts: Mapping[int, Part], *, is_out: bool
    ) -> None:
        """Pages go out first: so a stage is held up there."""
        if is_out:
            assert self._may_go.acquire(timeout=SOON_SECONDS), "nobody waits for a copy"
            self.held += 1
        self.mover.move_parts(pieces, parts, is_out=is_out)

    def __getattr__(self, name: str) -> object:
        return getattr(self.mover, name)


class LetsGo(CopyCounts):
    """Counts that let a stage go whenever a pass comes to wait for one."""

    def __init__(self, mover: HeldUp) -> None:
        self.mover = mover
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        is_wait = name == "waits" and value
        super().__setattr__(name, value)
        if is_wait:
            self.mover.let_go()


def hold_up(runner: Runner) -> HeldUp:
    """From now on the copier makes each stage only when the pass waits for it."""
    copier = copier_of(runner)
    mover = HeldUp(copier.mover)
    copier.mover = mover  # type: ignore[assignment]
    copier.counts = LetsGo(mover)
    return mover
