"""The lengths at which one group could resume, as the paper defines them (Jenga §5.2)."""

from collections.abc import Sequence

from kvell.prefix.groups.policies import GroupPolicy, StatePolicy


def possible_prefixes(policy: GroupPolicy, is_hit: Sequence[bool]) -> list[int]:
    """Return every length whose last ``policy.live_tokens(length)`` tokens are all cached.

    :param is_hit: for each token, whether it is cached; with states, whether one was kept after it.
    """
    if isinstance(policy, StatePolicy):
        return [length for length, hit in enumerate(is_hit, start=1) if hit]
    lengths, run = [], 0
    for length, hit in enumerate(is_hit, start=1):
        run = run + 1 if hit else 0
        if run >= policy.live_tokens(length):
            lengths.append(length)
    return lengths
