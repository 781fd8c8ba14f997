"""Planning ahead: step n+1 is planned while n runs (``Limits.depth`` 1).

::

    depth 0   plan 1 ─ run 1 ─ commit 1 ─ plan 2 ─ run 2 ─ commit 2 ─ …
    depth 1   plan 1 ─ run 1 ──────────┬─ run 2 ──────────────────┬─ run 3 …
                       plan 2          └─ commit 1 ─ plan 3       └─ commit 2 ─ plan 4

Plan n+1 is made without the ends and the tokens of step n; the runner fills the tokens in.  If a
plan depends on more of the previous step, steps are planned one after the other.
"""

from dataclasses import replace

from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, Layout

MOST_DEPTH = 1

_TEXT_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})


def overlap_problem(limits: Limits, layout: Layout, *, shares_pool: bool, swaps: bool) -> str:
    """Return why steps of this configuration cannot be planned ahead; "" if they can.

    :param shares_pool: activations are slots of the pool, which the next plan releases.
    :param swaps: pages of preempted or parked requests are copied to the CPU buffer.
    """
    kinds = {group.kind for group in layout.groups}
    if limits.num_speculative_tokens:
        return "draft tokens depend on tokens that the previous step samples"
    if shares_pool:
        return "activations share the pool with KV, and the next plan frees theirs"
    if swaps:
        return "pages for the CPU buffer hold results of the previous step"
    if GroupKind.STATE in kinds:
        return "the previous step decides where states are kept"
    if GroupKind.DROPPING in kinds:
        return "prompt tokens are dropped when the previous step ends"
    if not kinds <= _TEXT_KINDS or any(group.counts_images for group in layout.groups):
        return "pages of images are freed when the previous step ends"
    return ""


def chosen_depth(
    limits: Limits, layout: Layout, *, wanted: bool, shares_pool: bool, swaps: bool
) -> tuple[Limits, str]:
    """Return the limits with the depth to use, and its description in the startup message."""
    problem = ""
    if wanted:
        problem = overlap_problem(limits, layout, shares_pool=shares_pool, swaps=swaps)
    if problem:
        return replace(limits, depth=0), f"planned one after the other: {problem}"
    steps = "each is planned while the previous step runs" if wanted else ""
    return replace(limits, depth=MOST_DEPTH if wanted else 0), steps


def require_depth(limits: Limits, layout: Layout, *, shares_pool: bool, swaps: bool) -> None:
    """Check that steps can be planned as far ahead as ``limits.depth`` demands.

    :raises ValueError: if they cannot.
    """
    if not 0 <= limits.depth <= MOST_DEPTH:
        raise ValueError(f"depth={limits.depth}: steps are planned 0 or {MOST_DEPTH} ahead")
    problem = overlap_problem(limits, layout, shares_pool=shares_pool, swaps=swaps)
    if limits.depth and problem:
        raise ValueError(f"depth={limits.depth}: {problem}")
