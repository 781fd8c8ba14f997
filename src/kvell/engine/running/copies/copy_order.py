"""The order of a plan's copies: before the pass, or during it; pure.

A plan's order is: pages out, pages in, copies on the device, the pass.  A copy may run later if
nothing else reads or writes its bytes in between.  A page holds the parts of all layers, and a pass
touches a part only while it computes that layer::

    copier   out 0, in 0 │ out 1, in 1 │ … │ out: pages not written here
    pass                 └ layer 0 ────┴ layer 1 ── … ──────────────────┴ result

So a page may be copied out during a pass even if the same plan reuses it in its *group*, which
writes a part only with its layer.  It must be copied before if its bytes are written otherwise: by
pages of another group in the same large page, by a copy on the device, or by activations in the
same pool.  A step's result waits for all of its copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvell.engine.requests.plan import NewPages, StepPlan
from kvell.memory import GroupKind, GroupSpec
from kvell.pages.rows import CheckpointRow, FetchRow, NewPageRow, OffloadRow, PageRow
from kvell.pages.stages import BY_LAYER

BESIDE = BY_LAYER | {GroupKind.STATE}
"""Kinds that allow copies of other pages during the pass; states are copied in before it."""

Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def _no_rows() -> NewPages:
    return np.empty((0, 3), np.int32)


@dataclass(frozen=True)
class CopyOrder:
    """A plan's offloads and fetches by time; pages are copied out before others are copied in.

    :param first_out: whole pages before the pass, like ``first_in``.
    :param layered_out: each layer's part before the layer is computed, like ``layered_in``.
    :param last_out: whole pages before the step's result.
    :param why: the reason why all copies precede the pass; "" if not all must.
    """

    first_out: NewPages = field(default_factory=_no_rows)
    first_in: NewPages = field(default_factory=_no_rows)
    layered_out: NewPages = field(default_factory=_no_rows)
    layered_in: NewPages = field(default_factory=_no_rows)
    last_out: NewPages = field(default_factory=_no_rows)
    why: str = ""

    @property
    def is_under_pass(self) -> bool:
        """Whether there are copies during the pass."""
        return bool(len(self.layered_out) + len(self.layered_in) + len(self.last_out))


def has_spare_processor(processors: int, threads: int) -> bool:
    """Return whether a processor is free for copies while a pass computes.

    Otherwise a copy takes a processor from one thread of the pass, and the other threads wait for
    that thread: nothing is gained.

    :param processors: number of processors that the process may use.
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

    :param has_spare: whether a processor is free for copies while a pass computes.
    """
    out, back = plan.offloads, plan.fetches
    why = why_before(plan, groups, on_host=on_host, takes_images=takes_images, has_spare=has_spare)
    if why:
        return CopyOrder(out, back, why=why)
    models = {work.spec.model for work in plan.work}
    layered = np.asarray([g.kind in BY_LAYER and g.model in models for g in groups])
    counts = np.asarray([group.pages_per_large for group in groups], np.int64)
    pairs = [(copy.group, page) for copy in plan.copies for page in (copy.source, copy.target)]
    copied = np.asarray(pairs, np.int32).reshape(-1, 2)
    offloaded = out[:, [OffloadRow.GROUP, OffloadRow.PAGE]]
    fetched = back[:, [FetchRow.GROUP, FetchRow.PAGE]]
    written = np.concatenate(
        [
            fetched,
            plan.new_pages[:, [NewPageRow.GROUP, NewPageRow.PAGE]],
            plan.checkpoints[:, [CheckpointRow.GROUP, CheckpointRow.PAGE]],
        ]
    )
    back_first = ~layered[back[:, FetchRow.GROUP]] | _meet(fetched, copied, counts)
    is_written = _are_same(offloaded, written)
    out_first = is_written & ~layered[out[:, OffloadRow.GROUP]]
    out_first |= _share_large(offloaded, written, counts)
    out_first |= _meet(offloaded, copied, counts)
    held = out[:, [OffloadRow.GROUP, OffloadRow.HELD]]
    fetched_from = back[:, [FetchRow.GROUP, FetchRow.HELD]]
    out_first |= _meet(held, fetched_from, counts)  # fetched in the step that offloads it
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
    """Return the reason why all copies of a plan must precede its passes, or ""."""
    if not on_host:
        return "the pool is on a GPU, whose stream runs copies and pass in order"
    if not has_spare:
        return "the pass computes on every processor"
    if not plan.work:
        return "nothing is computed"
    if takes_images:
        return "embeddings of images are written into pages before any layer is computed"
    if any(group.is_draft for group in groups):
        return "a draft model runs several times before the model"
    if any(group.kind not in BESIDE for group in groups):
        return "pages of a group are not written layer by layer"
    if plan.slot is not None and len(plan.offloads):
        return "activations may overwrite pages that are being copied out"
    return ""


def _are_same(rows: NewPages, others: NewPages) -> Mask:
    """Return a mask of the rows (group, page) that are among others."""
    mine, theirs = (
        (some[:, PageRow.GROUP].astype(np.int64) << 32) | some[:, PageRow.PAGE]
        for some in (rows, others)
    )
    return np.isin(mine, theirs)


def _share_large(rows: NewPages, others: NewPages, counts: Counts) -> Mask:
    """Return a mask of the rows that share a large page with a row of another group."""
    mine, theirs = (
        some[:, PageRow.PAGE] // counts[some[:, PageRow.GROUP]] for some in (rows, others)
    )
    shares = np.zeros(len(rows), np.bool_)
    groups, other_groups = rows[:, PageRow.GROUP], others[:, PageRow.GROUP]
    for group in np.unique(groups):
        in_group = groups == group
        shares[in_group] = np.isin(mine[in_group], theirs[other_groups != group])
    return shares


def _meet(rows: NewPages, others: NewPages, counts: Counts) -> Mask:
    """Return a mask of the rows that may share bytes with others."""
    return _are_same(rows, others) | _share_large(rows, others, counts)
