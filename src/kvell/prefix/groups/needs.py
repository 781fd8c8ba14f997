"""The page positions of a group that a request needs, and its peak number of pages.

A position of a token group is ``page_tokens`` tokens of the text.  Positions of a state group are
the slices of the one running state.  In image groups the pages of the images follow each other, and
no two images share a page.
"""

import math
from collections.abc import Iterator, Sequence

from kvell.pages.layout import GroupKind, GroupSpec
from kvell.prefix.groups.facts import Facts, ImageSpan
from kvell.prefix.groups.policies import DroppingPolicy, GroupPolicy, policy_of

WINDOWS = frozenset({GroupKind.SLIDING, GroupKind.CHUNKED})


def alignment_tokens(groups: Sequence[GroupSpec]) -> int:
    """Return the number of tokens that fills whole pages in every token group: prefixes of its
    multiples are shared without a copy."""
    return math.lcm(*(group.page_tokens for group in groups if group.kind.counts_tokens))


def image_pages(group: GroupSpec, image: ImageSpan) -> int:
    return -(-image.image_tokens // group.page_tokens)


def dropped_tokens(group: GroupSpec, facts: Facts) -> int:
    if group.kind is not GroupKind.DROPPING:
        return 0
    return max(0, facts.prompt_tokens - group.window_tokens)


def end_position(group: GroupSpec, facts: Facts, tokens: int, computed: int = 0) -> int:
    """Return the position after the last one needed to compute ``computed … tokens-1``."""
    if tokens <= 0:
        return 0
    if group.kind is GroupKind.STATE:
        return group.slices
    if not group.kind.counts_tokens:
        return sum(image_pages(group, image) for image in facts.begun(tokens))
    count = tokens
    if group.counts_images:
        count += sum(image.image_tokens for image in facts.begun(tokens))
    elif group.holds_embeddings:
        count = max(count, *(image.end for image in facts.begun(tokens)), 0)
    elif (dropped := dropped_tokens(group, facts)) and tokens > facts.prompt_tokens:
        count -= dropped
        if computed < facts.prompt_tokens:
            count = max(count, facts.prompt_tokens)
    return -(-count // group.page_tokens)


def kept_from(group: GroupSpec, policy: GroupPolicy, facts: Facts, computed: int) -> int:
    """Return the first position that stays in use here once ``computed`` tokens are computed."""
    if group.kind is GroupKind.FULL:
        return facts.away_tokens // group.page_tokens
    if group.kind in WINDOWS:
        return policy.kept_start(computed) // group.page_tokens
    if group.kind is GroupKind.VISION:
        return _consumed_pages(group, facts, computed)
    return 0


def kept_to(group: GroupSpec, facts: Facts, computed: int) -> int:
    return -(-(computed - dropped_tokens(group, facts)) // group.page_tokens)


def resumed_from(group: GroupSpec, policy: GroupPolicy, facts: Facts, length: int) -> int:
    """Return the first position that a request resuming at ``length`` tokens needs."""
    if group.kind in WINDOWS:
        return policy.active_start(length) // group.page_tokens
    return kept_from(group, policy, facts, length)


def peak_pages(
    group: GroupSpec,
    facts: Facts,
    until_tokens: int,
    chunk_tokens: int,
    computed_tokens: int = 0,
) -> int:
    """Return the peak number of held pages from ``computed_tokens`` to ``until_tokens``.

    Tokens are computed in prefill chunks of ``chunk_tokens``.  The peak never exceeds the pages
    between the first active position and the end.  A prefill chunk needs the kept tokens and itself
    (``window + chunk`` in sliding and chunked-local groups); both ends may straddle a page.
    """
    policy = policy_of(group)
    start = kept_from(group, policy, facts, computed_tokens)
    whole = end_position(group, facts, until_tokens, computed_tokens) - start
    if group.kind is GroupKind.VISION:
        return min(whole, max(_pages_near(group, facts, until_tokens, chunk_tokens), default=0))
    kept = policy.most_kept_tokens(until_tokens)
    if group.kind not in WINDOWS or kept >= until_tokens:
        return whole
    return min(whole, -(-(kept + chunk_tokens - 1) // group.page_tokens) + 1)


def live_units(kind: GroupKind, policy: GroupPolicy, facts: Facts, computed: int) -> int:
    """Return the units of a request with ``computed`` tokens that a layer of a kind still needs:
    tokens of the text or of images that a later step may read, or one state."""
    if kind is GroupKind.CROSS:
        return sum(image.image_tokens for image in facts.begun(computed))
    if kind is GroupKind.VISION:
        begun = sum(image.image_tokens for image in facts.begun(computed))
        return begun - sum(consumed_tokens(image, computed) for image in facts.begun(computed))
    if isinstance(policy, DroppingPolicy) and computed >= facts.prompt_tokens:
        return computed - max(0, facts.prompt_tokens - policy.budget_tokens)
    return policy.live_tokens(computed)


def consumed_tokens(image: ImageSpan, computed: int) -> int:
    read = min(image.tokens, max(0, computed - image.start))
    return read * image.image_tokens // image.tokens


def _consumed_pages(group: GroupSpec, facts: Facts, computed: int) -> int:
    pages = 0
    for image in facts.begun(computed):
        if image.end > computed:
            return pages + consumed_tokens(image, computed) // group.page_tokens
        pages += image_pages(group, image)
    return pages


def _pages_near(group: GroupSpec, facts: Facts, until: int, chunk_tokens: int) -> Iterator[int]:
    for first in facts.begun(until):
        near = (i for i in facts.begun(until) if first.start <= i.start < first.end + chunk_tokens)
        yield sum(image_pages(group, image) for image in near)
