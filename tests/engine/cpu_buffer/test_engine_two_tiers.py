"""One hit over pool and buffer, against an oracle that knows what every page of either holds."""

import pytest

from tests.depth import machine, search_until_all
from tests.engine.cpu_buffer.two_tiers import TwoTiers

SORTS = "pool first", "buffer first", "by group", "state from the pool", "state from the buffer"

SOME = machine(40, weight=0.6)


@pytest.mark.hypothesis
def test_a_hit_is_the_longest_prefix_of_both_tiers() -> None:
    """A deep search goes on until every sort of hit across the tiers has happened."""
    TwoTiers.hits.clear()
    search_until_all(TwoTiers, SOME, lambda: [sort for sort in SORTS if not TwoTiers.hits[sort]])
