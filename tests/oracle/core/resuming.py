"""The lengths at which later prompts are likely to resume, and the pages that they need there.

Such lengths are a prompt's end, the length where it branched off, and its waypoints
(``docs/adr/0007``).  They need a state, or the last tokens of windows.  These pages count as
accessed when the request is expected to end.
"""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind
from kvell.prefix.eviction.checkpoints import prompt_end
from kvell.prefix.groups.needs import WINDOWS, alignment_tokens, resumed_from
from tests.oracle.eviction.checkpoints import Sort, waypoint_tokens, waypoints, waypoints_overlap
from tests.oracle.eviction.evictor import NORMAL
from tests.oracle.index.radix import Place
from tests.oracle.placement.holders import Holder
from tests.oracle.placement.store import Store

RENEW_STEPS = 16
"""The least steps between two renewals, which keep a running request's resume points young."""
RENEW_PAGES = 32
"""The most pages of a window that are renewed per step, on average."""


class Resuming:
    """The resume points of holders of one store. All methods change nothing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def needs_an_end(self, holder: Holder) -> bool:
        """Return whether the model can resume only where a state or window was kept."""
        kinds = {self._store.groups[index].kind for index in holder.own}
        return not kinds.isdisjoint((GroupKind.STATE, *WINDOWS))

    def points(self, holder: Holder) -> list[int]:
        """Return the lengths at which a later prompt is most likely to resume."""
        own = [self._store.groups[index] for index in holder.own]
        if not self.needs_an_end(holder):
            return []
        alignment = alignment_tokens(own)
        points = {holder.matched_tokens // alignment * alignment}
        if self._store.usefulness.rank(Sort.PROMPT_END) == NORMAL:
            points.add(prompt_end(holder.facts.prompt_tokens, alignment))
        return sorted(points - {0})

    def waypoints(self, holder: Holder) -> list[int]:
        """Return the waypoints of a long prompt, from which a later prompt may branch off."""
        own = [self._store.groups[index] for index in holder.own]
        alignment = alignment_tokens(own)
        prompt_tokens = holder.facts.prompt_tokens
        nearest = waypoint_tokens(own, alignment, prompt_tokens)
        return waypoints(prompt_tokens, alignment, nearest)

    def end_step(self, holder: Holder) -> int:
        return self._store.step + max(0, holder.expected_tokens - holder.num_tokens)

    def waypoint_step(self, holder: Holder) -> int:
        """Return the access time of waypoints: the expected end, or now if they overlap."""
        own = [self._store.groups[index] for index in holder.own]
        alignment = alignment_tokens(own)
        nearest = waypoint_tokens(own, alignment, holder.facts.prompt_tokens)
        overlap = waypoints_overlap(own, alignment, nearest)
        return self._store.step if overlap else self.end_step(holder)

    def renew_steps(self, holder: Holder) -> int:
        """Return the steps between two renewals while a request runs; more for long windows."""
        groups = (self._store.groups[index] for index in holder.own)
        pages = [g.window_tokens // g.page_tokens for g in groups if g.kind in WINDOWS]
        return max(RENEW_STEPS, max(pages, default=0) // RENEW_PAGES)

    def needed_places(
        self, holder: Holder, index: int, length: int, before: int | None = None
    ) -> list[Place]:
        """Return the places of the state, or of the window's whole pages, that resume a length.

        :param before: only pages at positions below it.
        """
        group, size = self._store.groups[index], self._store.groups[index].page_tokens
        if group.kind is GroupKind.STATE:
            return [(length, part) for part in range(group.slices)]
        if group.kind not in WINDOWS:
            return []
        first = resumed_from(group, self._store.policies[index], holder.facts, length)
        stop = length // size if before is None else min(length // size, before)
        return [((position + 1) * size, 0) for position in range(first, stop)]

    def places(self, holder: Holder, index: int, lengths: Sequence[int]) -> set[Place]:
        """Return the places in a group that resume these lengths."""
        return {place for length in lengths for place in self.needed_places(holder, index, length)}
