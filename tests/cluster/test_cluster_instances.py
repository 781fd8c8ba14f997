"""How many instances of which role, as users write it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.instances import (
    MOST_INSTANCES,
    Share,
    check_adaptive_roles,
    check_start,
    checked_counts,
    parse_instances,
    processor_shares,
)
from kvell.errors import ChangeSomething


@given(st.integers(1, MOST_INSTANCES))
def test_a_number_alone_is_of_mixed_instances(count: int) -> None:
    wanted = {"mixed": count}
    assert parse_instances(str(count)) == parse_instances(f"mixed={count}") == wanted
    assert parse_instances(f" mixed = {count} ") == checked_counts(wanted) == wanted


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a whole number of instances"),
        ("mixed", "is not a whole number of instances"),
        ("mixed=", "is not a whole number of instances"),
        ("mixed=-1", "is not a whole number of instances"),
        ("mixed=1.5", "is not a whole number of instances"),
        ("²", "is not a whole number of instances"),
        ("mixed=0", "must be between 1 and 64 instances"),
        ("65", "must be between 1 and 64 instances"),
        ("9" * 5000, "must be between 1 and 64 instances"),
        ("mixed=1,mixed=2", "names mixed twice"),
        ("mixed=1,", "is not a whole number of instances"),
        ("=3", "'' is not a role of an instance"),
        ("prefil=1", "'prefil' is not a role of an instance"),
        ("mixed=1=2", "'mixed=1' is not a role of an instance"),
    ],
)
def test_anything_else_is_refused_with_field_problem_and_remedy(text: str, problem: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        parse_instances(text)
    assert (caught.value.field, caught.value.problem) == ("--instances", problem)
    assert caught.value.remedy.startswith("write it like mixed=")


@given(st.text(max_size=20))
def test_no_text_is_anything_but_read_or_refused(text: str) -> None:
    try:
        assert min(parse_instances(text, "instances").values()) > 0
    except ChangeSomething as error:
        assert error.field == "instances"


@pytest.mark.parametrize("counts", [{}, {"mixed": 0}, {"mixed": 65}, {"mixed": -1}, {"drafts": 1}])
def test_counts_that_came_as_data_are_checked_too(counts: dict[str, int]) -> None:
    with pytest.raises(ChangeSomething, match="instances="):
        checked_counts(counts)


@pytest.mark.parametrize("text", ["prefill=1,decode=2", "mixed=2", "prefill=2,decode=1,mixed=1"])
def test_roles_that_serve_together_may_start(text: str) -> None:
    check_start(parse_instances(text))


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("prefill=2", "write it like prefill=2,decode=1"),
        ("mixed=1,decode=3", "write it like decode=3,prefill=1"),
    ],
)
def test_half_of_the_work_alone_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(ChangeSomething) as caught:
        check_start(parse_instances(text))
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    "counts", [{"mixed": 3}, {"prefill": 1, "decode": 1}, {"prefill": 3}, {"mixed": 2, "decode": 3}]
)
def test_roles_that_nobody_could_change_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ChangeSomething, match=r"--adaptive-roles.*prefill=1,decode=2"):
        check_adaptive_roles(counts, "--adaptive-roles")


@pytest.mark.parametrize(
    "counts", [{"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1, "mixed": 1}]
)
def test_roles_that_may_change_are_not(counts: dict[str, int]) -> None:
    check_adaptive_roles(counts, "--adaptive-roles")


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
