"""The longest prefix that every group can resume from (Jenga §5.2)."""

import math
from collections.abc import Sequence

from kvell.pages.layout import GroupSpec
from kvell.prefix.policies import GroupPolicy


def alignment_tokens(groups: Sequence[GroupSpec]) -> int:
    """Hits end on whole pages of every group (copy-on-write of a tail page comes later)."""
    return math.lcm(*(group.page_tokens for group in groups))


def longest_hit(
    groups: Sequence[GroupSpec],
    policies: Sequence[GroupPolicy],
    found: Sequence[dict[int, int]],
    limit_tokens: int,
) -> int:
    """Longest resumable length ≤ ``limit_tokens``, searched from the longest downward.

    :param found: per group, page position → cached or used page, along the matched path.
    """
    step = alignment_tokens(groups)
    longest = limit_tokens // step * step
    runs = [_runs(f, longest // g.page_tokens) for f, g in zip(found, groups, strict=True)]
    for length in range(longest, 0, -step):
        if all(_resumes(g, p, r, length) for g, p, r in zip(groups, policies, runs, strict=True)):
            return length
    return 0


def hit_positions(group: GroupSpec, policy: GroupPolicy, length: int) -> range:
    """Page positions a request needs to resume at ``length`` in this group."""
    return range(policy.active_start(length) // group.page_tokens, length // group.page_tokens)


def _resumes(group: GroupSpec, policy: GroupPolicy, runs: Sequence[int], length: int) -> bool:
    needed = hit_positions(group, policy, length)
    return not policy.required_for_hit or not needed or runs[needed.stop - 1] >= len(needed)


def _runs(found: dict[int, int], count: int) -> list[int]:
    """For each position, how many consecutive positions up to and with it are found."""
    runs, run = [], 0
    for position in range(count):
        run = run + 1 if position in found else 0
        runs.append(run)
    return runs
