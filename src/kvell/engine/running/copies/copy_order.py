"""Which of a plan's copies must be made before the pass, and which may be under it; pure.

A plan says: pages out, pages in, copies on the device, the pass.  A copy may come later than that
where nothing else reads or writes its bytes in between.  A page holds one layer's part after the
other, and a pass touches a part only where it computes that layer::

    copier   out 0, in 0 │ out 1, in 1 │ … │ pages out that nobody writes
    pass                 └ layer 0 ────┴ layer 1 ── … ───────────────────┴ result

So a page may go out under a pass even if the same plan gives it to others of its *group*, which
write a part only with its layer.  It may not where its bytes are written otherwise: by pages of
another group in the same large page, by a copy on the device, by activations in the same pool.
A step's result waits for all of its copies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.memory import GroupKind, GroupSpec
from kvell.pages.stages import BY_LAYER

BESIDE = BY_LAYER | {GroupKind.STATE}
"""Kinds beside which others may be copied under the pass; states themselves come in before it."""

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def _no_rows() -> NewPages:
    return np.empty((0, 3), np.int32)


@dataclass(frozen=True)
class CopyOrder:
    """A plan's offloads and fetches by when they are made; pages go out before others come in.

    :param first_out: whole pages before the pass, and so ``first_in``.
    :param layered_out: each layer's part before the layer is computed, and so ``layered_in``.
    :param last_out: whole pages before the step's result.
    :param why: what keeps all of them before the pass; "" if nothing keeps all of them there.
    """

    first_out: NewPages = field(default_factory=_no_rows)
    first_in: NewPages = field(default_factory=_no_rows)
    layered_out: NewPages = field(default_factory=_no_rows)
    layered_in: NewPages = field(default_factory=_no_rows)
    last_out: NewPages = field(default_factory=_no_rows)
    why: str = ""

    @property
    def is_under_pass(self) -> bool:
        """Whether anything is copied while the pass computes."""
        return bool(len(self.layered_out) + len(self.layered_in) + len(self.last_out))


def has_spare_processor(processors: int, threads: int) -> bool:
    """Whether a processor is left for copies while a pass computes.

    Where there is none, a copy beside a pass takes from it what it needs, and the pass's threads
    wait for the one that lost its processor: nothing is gained.

    :param processors: that the process may use.
    :param threads: of a pass.
    """
    return processors > threads


def copy_order(
    plan: StepPlan,
    groups: Sequence[GroupSpec],
    *,
    on_host: bool,
    takes_images: bool = False,
    has_spare: bool = True,
) -> CopyOrder:
    """Order a plan's copies between pool and CPU buffer.

    :param groups: of the pool.
    :param on_host: whether the pool is host memory.
    :param takes_images: whether a model of the pool does.
    :param has_spare: whether a processor is left for copies while a pass computes.
    """
    out, back = plan.offloads, plan.fetches
    why = why_before(plan, groups, on_host=on_host, takes_images=takes_images, has_spare=has_spare)
    if why:
        return CopyOrder(out, back, why=why)
    models = {work.model for work in plan.work}
    layered = np.asarray([g.kind in BY_LAYER and g.model in models for g in groups])
    counts = np.asarray([group.pages_per_large for group in groups], np.int64)
    copied = _pairs(
        (copy.group, page) for copy in plan.copies for page in (copy.source, copy.target)
    )
    written = np.concatenate(
        [back[:, [0, 2]], plan.new_pages[:, [1, 3]], plan.checkpoints[:, [1, 4]]]
    )
    back_first = ~layered[back[:, 0]] | _meet(back[:, [0, 2]], copied, counts)
    is_written = _are_same(out[:, :2], written)
    out_first = (is_written & ~layered[out[:, 0]]) | _share_large(out[:, :2], written, counts)
    out_first |= _meet(out[:, :2], copied, counts)
    out_first |= _meet(out[:, [0, 2]], back[:, :2], counts)  # what comes in was just sent out
    out_layered = is_written & ~out_first
    return CopyOrder(
        out[out_first],
        back[back_first],
        out[out_layered],
        back[~back_first],
        out[~out_first & ~out_layered],
    )


def why_before(
    plan: StepPlan,
    groups: Sequence[GroupSpec],
    *,
    on_host: bool,
    takes_images: bool = False,
    has_spare: bool = True,
) -> str:
    """What keeps all copies of a plan before its passes; "" if nothing does."""
    if not on_host:
        return "the pool is on a GPU, whose stream does one thing after the other"
    if not has_spare:
        return "the pass computes on every processor"
    if not plan.work:
        return "nothing is computed"
    if takes_images:
        return "embeddings of images are written into pages before any layer is computed"
    if any(group.is_draft for group in groups):
        return "a draft model computes several times before the model does"
    if any(group.kind not in BESIDE for group in groups):
        return "pages of a group are not written layer by layer"
    if plan.slot is not None and len(plan.offloads):
        return "activations may be computed where pages go out"
    return ""


def _pairs(found: Iterable[tuple[int, int]]) -> NewPages:
    return np.asarray(list(found), np.int32).reshape(-1, 2)


def _are_same(rows: NewPages, others: NewPages) -> Mask:
    """Which rows (group, page) are among others."""
    mine, theirs = ((some[:, 0].astype(np.int64) << 32) | some[:, 1] for some in (rows, others))
    return np.isin(mine, theirs)


def _share_large(rows: NewPages, others: NewPages, counts: Counts) -> Mask:
    """Which rows have a large page in common with others of another group."""
    mine, theirs = (some[:, 1] // counts[some[:, 0]] for some in (rows, others))
    found = np.zeros(len(rows), np.bool_)
    for group in np.unique(rows[:, 0]):
        own = rows[:, 0] == group
        found[own] = np.isin(mine[own], theirs[others[:, 0] != group])
    return found


def _meet(rows: NewPages, others: NewPages, counts: Counts) -> Mask:
    """Which rows may have bytes in common with others."""
    return _are_same(rows, others) | _share_large(rows, others, counts)
