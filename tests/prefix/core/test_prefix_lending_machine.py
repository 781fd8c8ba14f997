"""Both cores in lockstep while first tokens of most requests lie elsewhere, more and fewer."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvell.pages.layout import GroupKind, GroupSpec, Layout
from tests.depth import machine, search_until_all
from tests.pages.pools import confined, group, images, literal, state
from tests.prefix.core.lockstep import (
    LockStep,
    drafter_groups,
    large_pages,
    merged_groups,
    page_sizes,
    token_groups,
)

full_groups = st.builds(group, page_sizes, large_pages)
groups_beside = st.one_of(
    token_groups,
    drafter_groups,
    merged_groups,
    st.builds(state, st.integers(1, 3), large_pages),
    st.builds(
        images, st.sampled_from([GroupKind.CROSS, GroupKind.VISION]), page_sizes, large_pages
    ),
)
lending_mixes = st.builds(
    lambda first, others: [first, *others], full_groups, st.lists(groups_beside, max_size=3)
)

CASES = (
    "more",
    "fewer",
    "refused",
    "hit beside away",
    "home and named",
    "home beside another's",
    "home to nowhere",
)
"""What has to happen while the machine runs, or it tells nothing."""


class LendingLockStep(LockStep):
    """Models with full attention, whose requests lend and take back all the time."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(
        groups=lending_mixes,
        others=st.one_of(st.just([]), st.just([]), lending_mixes),
        num_large=st.one_of(st.integers(3, 12), st.integers(8, 60)),
        sharing=st.sampled_from([replace, replace, replace, literal, confined]),
    )
    def start(
        self,
        groups: list[GroupSpec],
        others: list[GroupSpec],
        num_large: int,
        sharing: Callable[[Layout], Layout],
    ) -> None:
        super().start(groups, others, num_large, sharing)

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(0, 63), less=st.integers(0, 2), chunk=st.integers(0, 20))
    def lend(self, chosen: int, less: int, chunk: int) -> None:
        self.send_away(chosen, -1 - less, 0, chunk)

    @precondition(lambda self: any(self.away.values()))
    @rule(chosen=st.integers(0, 63), whole=st.integers(0, 2), ahead=st.sampled_from([None, 0, 1]))
    def take_back(self, chosen: int, whole: int, ahead: int | None) -> None:
        """Most of what somebody lent; without a step it is only asked for."""
        lent = sorted(handle for handle, away in self.away.items() if away)
        handle = lent[chosen % len(lent)]
        if not len(self.both("sources", handle)):
            self.reached["home to nowhere"] += ahead is None
            self.send_away(sorted(self.known).index(handle), whole, 0, ahead)


LENT = machine(weight=0.5)


@pytest.mark.hypothesis
def test_both_cores_lend_alike_whatever_happens() -> None:
    """A deep search goes on until every case has happened: most need one or two."""
    LendingLockStep.reached.clear()
    reached = LendingLockStep.reached
    search_until_all(LendingLockStep, LENT, lambda: [case for case in CASES if not reached[case]])
