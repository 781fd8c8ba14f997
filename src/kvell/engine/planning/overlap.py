"""Planning ahead: step n+1 is planned while n runs (``Limits.depth`` 1).

::

    depth 0   plan 1 ─ run 1 ─ commit 1 ─ plan 2 ─ run 2 ─ commit 2 ─ …
    depth 1   plan 1 ─ run 1 ──────────┬─ run 2 ──────────────────┬─ run 3 …
                       plan 2          └─ commit 1 ─ plan 3       └─ commit 2 ─ plan 4

Plan n+1 is made without the ends and the tokens of step n; the runner fills the tokens in.  Steps
run in order, so a plan may use pages, chunks and buffer pages that the previous step still reads.
If a plan depends on more of a step's result, it is made when the result is committed (a fence).
"""

from collections.abc import Iterable
from dataclasses import replace

from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import TokenWork
from kvell.memory import GroupKind, Layout

MOST_DEPTH = 1

_TEXT_KINDS = frozenset({GroupKind.FULL, GroupKind.SLIDING, GroupKind.CHUNKED})


class Fences:
    """The steps after which nothing is planned before their result.

    They are those that sample where draft tokens may follow, since the number of right ones is not
    known; and those with a prompt's tokens where the result decides which pages are kept: states,
    pages of images and of budgets.
    """

    def __init__(self, limits: Limits, layout: Layout) -> None:
        self._has_drafts = limits.num_speculative_tokens > 0
        self._models = {
            group.model
            for group in layout.groups
            if group.kind not in _TEXT_KINDS or group.counts_images or group.holds_embeddings
        }
        self._is_needed = limits.depth > 0 and (self._has_drafts or bool(self._models))

    def is_after(self, works: Iterable[TokenWork]) -> bool:
        return self._is_needed and any(map(self._decides, works))

    def _decides(self, work: TokenWork) -> bool:
        is_decode = work.samples and work.known == 1 and work.output_index > 0
        return (self._has_drafts and work.samples) or (
            not is_decode and work.spec.model in self._models
        )


def with_depth(limits: Limits, is_wanted: bool | None, *, default: bool) -> tuple[Limits, str]:
    """Return the limits with the depth to use, and its description in the startup message.

    :param is_wanted: whether to plan ahead; None: ``default``.
    """
    is_ahead = default if is_wanted is None else is_wanted
    steps = "each is planned while the previous step runs"
    if limits.num_speculative_tokens:
        steps += ", except after steps that may have draft tokens"
    return replace(limits, depth=MOST_DEPTH * is_ahead), steps if is_ahead else ""


def require_depth(depth: int) -> None:
    """Check a depth.

    :raises ValueError: if steps cannot be planned as far ahead.
    """
    if not 0 <= depth <= MOST_DEPTH:
        raise ValueError(f"depth={depth}: steps are planned 0 or {MOST_DEPTH} ahead")
