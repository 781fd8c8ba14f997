"""The longest prefix that every group can resume from (Jenga §5.2)."""

from collections.abc import Iterable, Iterator, Sequence

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts
from kvell.prefix.groups.needs import alignment_tokens, dropped_tokens, image_pages, resumed_from
from kvell.prefix.groups.policies import GroupPolicy
from tests.oracle.index.radix import Place
from tests.oracle.index.seen import cuts_image

Found = dict[Place, int]
"""The cached or used pages of one group along a path: (end, part) → page."""


def longest_hit(
    groups: Sequence[GroupSpec],
    policies: Sequence[GroupPolicy],
    cached: Sequence[Found],
    limit_tokens: int,
    facts: Facts,
) -> int:
    """Return the longest resumable length ≤ ``limit_tokens``, searching downward.

    Candidates are the limit, lengths where pages end in every group, lengths where a request ended,
    and the edges of images; with state groups, only lengths where a state was kept.
    """
    required = [
        (group, policy, pages)
        for group, policy, pages in zip(groups, policies, cached, strict=True)
        if policy.required_for_hit
    ]
    for group, _, pages in required:
        if dropped_tokens(group, facts):
            limit_tokens = min(limit_tokens, facts.prompt_tokens - 1)
        if group.kind in (GroupKind.FULL, GroupKind.DROPPING):
            size = group.page_tokens
            limit_tokens = min(
                limit_tokens, whole_run(group, pages, limit_tokens) * size + size - 1
            )
    for length in sorted(_candidates(required, limit_tokens, facts), reverse=True):
        if not cuts_image(facts, length) and all(
            resumes(group, policy, pages, length, facts) for group, policy, pages in required
        ):
            return length
    return 0


def resumes(group: GroupSpec, policy: GroupPolicy, pages: Found, length: int, facts: Facts) -> bool:
    """Return whether the group has all pages to continue after ``length`` tokens."""
    if group.kind is GroupKind.STATE:
        return all((length, part) in pages for part in range(group.slices))
    if group.kind is GroupKind.CROSS:
        return all(place in pages for place in image_places(group, facts, length))
    if group.counts_images and facts.images:
        return False
    size = group.page_tokens
    whole = range(resumed_from(group, policy, facts, length), length // size)
    if any(((position + 1) * size, 0) not in pages for position in whole):
        return False
    return length % size == 0 or tail_page(group, pages, length) is not None


def tail_page(group: GroupSpec, pages: Found, length: int) -> int | None:
    """Return a page that begins with the prefix's last ``length % page_tokens`` tokens, or None."""
    size = group.page_tokens
    ends = (length // size * size + size, *range(length, length // size * size + size))
    return next((pages[end, 0] for end in ends if (end, 0) in pages), None)


def image_places(group: GroupSpec, facts: Facts, length: int) -> Iterator[Place]:
    """Yield the index places of all images that end within a prefix, by position."""
    for image in facts.images:
        if image.end <= length:
            yield from ((image.end, part) for part in range(image_pages(group, image)))


def whole_run(group: GroupSpec, pages: Found, length: int) -> int:
    """Return the number of whole pages before the first hole, within ``length`` tokens."""
    size = group.page_tokens
    positions = range(length // size)
    return next((p for p in positions if ((p + 1) * size, 0) not in pages), len(positions))


def _candidates(
    required: Iterable[tuple[GroupSpec, GroupPolicy, Found]], limit_tokens: int, facts: Facts
) -> set[int]:
    groups = [group for group, _, _ in required]
    states = [pages for group, _, pages in required if group.kind is GroupKind.STATE]
    if states:
        return {end for end, _ in states[0] if 0 < end <= limit_tokens}
    step = alignment_tokens(groups)
    tails = {
        end
        for group, _, pages in required
        if group.kind.counts_tokens
        for end, _ in pages
        if end % group.page_tokens
    }
    runs = {
        whole_run(group, pages, limit_tokens) * group.page_tokens
        for group, _, pages in required
        if group.kind is GroupKind.FULL
    }
    around = {edge for image in facts.images for edge in (image.start, image.end)}
    lengths = tails | around | runs | {limit_tokens, *range(step, limit_tokens + 1, step)}
    return {length for length in lengths if 0 < length <= limit_tokens}
