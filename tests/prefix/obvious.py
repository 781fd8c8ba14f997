"""What is right, said slowly: no heaps, no tree, one loop for each word of the definition.

Prefixes are numbers: equal number, equal tokens from the first on (and equal model and
salt).  ``chain[i]`` is the number of the first ``i + 1`` tokens of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import PoolSnapshot
from kvell.prefix.groups.facts import Facts

Named = set[tuple[int, int, int]]
"""(group, prefix, part) of every page that may be hit: its last token ends that prefix."""


@dataclass(frozen=True)
class Question:
    """Where can a request with these tokens resume?

    :param named: pages in the index by the prefix that they end.
    :param written: (group, prefix) of every token in them, by the prefix that it ends.
    """

    groups: Sequence[tuple[int, GroupSpec]]
    named: Named
    written: set[tuple[int, int]]
    chain: Sequence[int]
    facts: Facts

    def most(self) -> int:
        return self._longest(lambda length: True, self._is_written)

    def promised(self) -> int:
        """The longest that must be found: where pages end in every group, where a request
        ended, at a state, beside an image, and at the last token but one."""
        return self._longest(self._is_tried, self._is_named)

    def _longest(
        self, is_tried: Callable[[int], bool], has: Callable[[int, int, int], bool]
    ) -> int:
        required = [(i, g) for i, g in self.groups if g.required_for_hit]
        for length in range(len(self.chain) - 1, 0, -1):
            cut = any(image.start < length < image.end for image in self.facts.images)
            if (
                not cut
                and is_tried(length)
                and all(self._resumes(i, g, length, has) for i, g in required)
            ):
                return length
        return 0

    def _is_tried(self, length: int) -> bool:
        required = [(i, g) for i, g in self.groups if g.required_for_hit]
        sizes = [(i, g.page_tokens) for i, g in required if g.kind.counts_tokens]
        return (
            any(g.kind is GroupKind.STATE for _, g in required)
            or length == len(self.chain) - 1
            or any(length in (image.start, image.end) for image in self.facts.images)
            or all(length % size == 0 for _, size in sizes)
            or any(length % size and self._has(i, length) for i, size in sizes)
        )

    def _has(self, index: int, end: int, part: int = 0) -> bool:
        return (index, self.chain[end - 1], part) in self.named

    def _resumes(
        self, index: int, group: GroupSpec, length: int, has: Callable[[int, int, int], bool]
    ) -> bool:
        """Is all there that token number ``length`` reads in one group?"""
        if group.kind is GroupKind.STATE:
            return all(self._has(index, length, part) for part in range(group.slices))
        if group.kind is GroupKind.VISION:
            return True
        if group.kind is GroupKind.CROSS:
            return all(
                self._has(index, image.end, part)
                for image in self.facts.images
                if image.end <= length
                for part in range(-(-image.image_tokens // group.page_tokens))
            )
        if group.counts_images and self.facts.images:
            return False
        if drops(group, self.facts) and length >= self.facts.prompt_tokens:
            return False
        size = group.page_tokens
        first = next((token for token in range(length) if reads(group, length, token)), length)
        needed = range(first // size * size, length)
        return all(has(index, size, token) for token in reversed(needed))

    def _is_named(self, index: int, size: int, token: int) -> bool:
        """Is a page named that holds the token, and ends on the way to the last one?"""
        ends = range(token + 1, min(len(self.chain), token // size * size + size) + 1)
        return any(self._has(index, end) for end in ends)

    def _is_written(self, index: int, size: int, token: int) -> bool:
        """Is a page named that holds the token after the same tokens, whatever follows?"""
        return (index, self.chain[token]) in self.written


def reads(group: GroupSpec, token: int, earlier: int) -> bool:
    if group.kind is GroupKind.SLIDING:
        return token - earlier < group.window_tokens
    if group.kind is GroupKind.CHUNKED:
        return token // group.window_tokens == earlier // group.window_tokens
    return True


def drops(group: GroupSpec, facts: Facts) -> bool:
    return group.kind is GroupKind.DROPPING and facts.prompt_tokens > group.window_tokens


@dataclass(frozen=True)
class Held:
    """What a request has in one group: positions ``first … end-1``."""

    first: int
    end: int


def pages_needed(group: GroupSpec, facts: Facts, held: Held, computed: int, until: int) -> int:
    """Pages beyond those held, to have ``until`` tokens computed; counted one by one."""
    if until <= 0:
        return 0
    positions = _positions(group, facts, held, computed, until)
    missing = [position for position in positions if position >= held.end]
    if group.kind is GroupKind.FULL:
        away = [t // group.page_tokens for t in range(facts.away_tokens)]
        missing += set(range(held.first)) - set(away)
    return len(missing)


def _positions(group: GroupSpec, facts: Facts, held: Held, computed: int, until: int) -> set[int]:
    size = group.page_tokens
    begun = [image for image in facts.images if image.start < until]
    if group.kind is GroupKind.STATE:
        return set(range(group.slices))
    if not group.kind.counts_tokens:
        return set(range(sum(-(-image.image_tokens // size) for image in begun)))
    if drops(group, facts) and until > facts.prompt_tokens:
        kept = until - facts.prompt_tokens + group.window_tokens
        most = kept if computed >= facts.prompt_tokens else max(kept, facts.prompt_tokens)
        return {slot // size for slot in range(most)}
    slots = set(range(until))
    if group.counts_images:
        slots = set(range(until + sum(image.image_tokens for image in begun)))
    if group.holds_embeddings:
        slots |= {t for image in begun for t in range(image.start, image.end)}
    return {slot // size for slot in slots}


def can_all_be_had(layout: Layout, state: PoolSnapshot, need: Sequence[int]) -> bool:
    """Is there any way to give whole large pages to groups so that all get what they need?"""
    whole = sum(1 for used in state.used if not used)
    have = [_in_used_larges(layout, state, group) for group in range(len(layout.groups))]
    most = [_share_left(layout, state, group, whole) for group in range(len(layout.groups))]

    def ways(group: int, left: int) -> bool:
        if group == len(need):
            return True
        count = layout.groups[group].pages_per_large
        return any(
            have[group] + given * count >= need[group] and ways(group + 1, left - given)
            for given in range(min(left, most[group]) + 1)
        )

    # Shares never exceed the pool together, so what one group takes is nobody else's.
    return ways(0, len(state.used) * len(need) if layout.quota_large_pages else whole)


def _in_used_larges(layout: Layout, state: PoolSnapshot, group: int) -> int:
    count = layout.groups[group].pages_per_large
    pairs = zip(state.group, state.used, strict=True)
    return sum(count - used for owner, used in pairs if owner == group and used)


def _share_left(layout: Layout, state: PoolSnapshot, group: int, whole: int) -> int:
    if layout.quota_large_pages is None:
        return whole
    pairs = zip(state.group, state.used, strict=True)
    return layout.quota_large_pages[group] - sum(1 for g, used in pairs if g == group and used)


def longest_run(layout: Layout, state: PoolSnapshot, needs: Sequence[Sequence[int]]) -> int:
    """How many requests from the front can be served together."""
    return _longest(
        len(needs),
        lambda n: can_all_be_had(
            layout, state, [sum(column) for column in zip(*needs[:n], strict=True)]
        ),
    )


def _longest(most: int, possible: Callable[[int], bool]) -> int:
    served = 0
    while served < most and possible(served + 1):
        served += 1
    return served
