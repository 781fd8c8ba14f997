"""Processors and threads of instances on one host."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.instances import Share, processor_shares

processor_sets = st.sets(st.integers(0, 200), min_size=1, max_size=70)


@given(processor_sets, st.data())
def test_enough_processors_are_divided_without_rest(
    processors: set[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(processors)))
    given_in_any_order = data.draw(st.permutations(sorted(processors)))
    shares = processor_shares(given_in_any_order, count)
    # Their sum in order says all of it: disjoint, complete, and each consecutive.
    assert [one for share in shares for one in share.processors] == sorted(processors)
    sizes = [len(share.processors) for share in shares]
    assert len(sizes) == count and max(sizes) - min(sizes) <= 1
    assert [share.threads for share in shares] == sizes


@given(processor_sets, st.integers(1, 64))
def test_too_few_processors_are_shared_by_all(processors: set[int], further: int) -> None:
    count = len(processors) + further
    assert (
        processor_shares(list(processors), count) == [Share(tuple(sorted(processors)), 1)] * count
    )


def test_three_instances_on_two_processors_roam() -> None:
    assert processor_shares([0, 1], 3) == [Share((0, 1), 1)] * 3


def test_one_instance_has_all() -> None:
    assert processor_shares([4, 5, 6], 1) == [Share((4, 5, 6), 3)]


@pytest.mark.parametrize(("processors", "instances"), [([], 1), ([0], 0)])
def test_nothing_to_share_is_a_callers_mistake(processors: list[int], instances: int) -> None:
    with pytest.raises(ValueError, match="nothing to share"):
        processor_shares(processors, instances)
