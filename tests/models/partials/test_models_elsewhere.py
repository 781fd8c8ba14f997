"""A pass whose first sections others compute gives the bits of one with all pages local."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvell.attention.interface import GroupBatch
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.models.partials.remote_sections import RemoteSections, SectionRun
from kvell.vocabulary import SECTION_TOKENS
from tests.depth import few
from tests.models.cases import covering
from tests.models.lent_pass import (
    CONTEXT,
    DEBTOR,
    Lender,
    Work,
    called,
    lent_logits,
    lent_runs,
    local_logits,
    prefix_of,
    rows_of,
)

pytest.importorskip("kvell.models.fused._forward")
DTYPES = (torch.float32, torch.bfloat16)
FULL, MIXED = "LlamaForCausalLM", "Gemma2ForCausalLM"
CREDITORS = ("x", "y")
LATE_SECONDS = 0.05
both_passes = pytest.mark.parametrize("is_fused", [True, False], ids=["compiled", "modules"])
BOTH = [Work(1600, 1, ("x", "x", "y")), Work(1100, 1, ("y", "y")), Work(900, 1)]
"""Decodes: of two creditors, of one, and of none."""


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    """Models last as long as this file's tests."""
    yield
    prefix_of.cache_clear()


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        new = draw(st.sampled_from([1, 1, 1, 2, 7, 60]))
        before = draw(st.integers(0, CONTEXT - new))
        most = before // SECTION_TOKENS
        owners = draw(st.lists(st.sampled_from(CREDITORS), max_size=most))
        found.append(Work(before, new, tuple(owners)))
    return found


@covering(
    {"architecture": [FULL, MIXED], "dtype": DTYPES, "threads": [1, 2], "is_fused": [True, False]}
)
@given(drawn=works())
@example(drawn=BOTH)
@example(drawn=[Work(1536, 1, ("x", "y", "x"))])  # nothing is local but the row itself
@example(drawn=[Work(1100, 500, ("x", "y")), Work(1200, 1, ("y",))])  # a chunk beside a decode
@few()
def test_what_others_compute_changes_no_bit(
    architecture: str, dtype: torch.dtype, threads: int, is_fused: bool, drawn: list[Work]
) -> None:
    prefix = prefix_of(architecture, dtype, threads, is_fused)
    local = local_logits(prefix, drawn)
    assert not local.isnan().any()
    lenders = {name: Lender(prefix, seed) for seed, name in enumerate(CREDITORS)}
    elsewhere = RemoteSections({name: one.creditor for name, one in lenders.items()})
    lent = lent_logits(prefix, drawn, elsewhere, lent_runs(lenders, drawn))
    assert elsewhere.lacking == []
    assert torch.equal(lent, local)
    assert [one.service.wrong() + one.service.reading() for one in lenders.values()] == [0, 0]


@both_passes
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_go_in_as_many_queries_as_a_creditor_has_room_for(
    dtype: torch.dtype, is_fused: bool
) -> None:
    drawn = [Work(1100, 300, ("x", "y")), Work(1200, 1, ("y", "y"))]
    prefix = prefix_of(FULL, dtype, 1, is_fused)
    local = local_logits(prefix, drawn)
    lenders = {
        name: Lender(prefix, seed, most=1, room_bytes=8 << 10)
        for seed, name in enumerate(CREDITORS)
    }
    elsewhere = RemoteSections({name: one.creditor for name, one in lenders.items()})
    assert torch.equal(lent_logits(prefix, drawn, elsewhere, lent_runs(lenders, drawn)), local)
    assert elsewhere.lacking == []
    posted = [one.line.posted for one in lenders.values()]
    assert min(posted) > 3 * 3, "of three layers, in several each"


def by_call(
    lender: Lender, before: Callable[[int], None] = lambda number: None, late: Sequence[int] = ()
) -> Any:
    """A creditor whose service is called; ``before`` is told how many queries there were.

    :param late: queries whose answers do not come.
    """
    answers: list[bytes] = []
    count = 0

    def post(query: bytes) -> bool:
        nonlocal count
        before(count)
        if count not in late:
            answers.append(lender.service.answer(DEBTOR, query))
        count += 1
        return True

    def take(seconds: float) -> bytes | None:
        return answers.pop(0) if answers else None

    return called(post, take)


@covering({"late": [0, 1, 2], "threads": [1, 2], "is_fused": [True, False]}, together=1)
def test_a_late_answer_makes_its_row_missed_and_changes_no_other(
    late: int, threads: int, is_fused: bool
) -> None:
    """In any layer; the creditor is not asked again in the pass."""
    drawn = [Work(1600, 1, ("x", "x")), Work(1100, 1, ("y", "y")), Work(900, 1)]
    prefix = prefix_of(FULL, torch.float32, threads, is_fused)
    local = local_logits(prefix, drawn)
    lenders = {name: Lender(prefix, seed) for seed, name in enumerate(CREDITORS)}
    asked: list[int] = []
    creditors = {
        "x": by_call(lenders["x"], asked.append, late=[late]),
        "y": lenders["y"].creditor,
    }
    elsewhere = RemoteSections(creditors)
    runs = lent_runs(lenders, drawn)
    lent = lent_logits(prefix, drawn, elsewhere, runs, LATE_SECONDS * 100)
    assert elsewhere.lacking == [0]
    assert asked == list(range(late + 1))
    assert torch.equal(lent[1:], local[1:])
    assert not torch.equal(lent[0], local[0])
    assert torch.equal(lent_logits(prefix, drawn, elsewhere, runs), local), "and it is asked again"
    assert elsewhere.lacking == []


@both_passes
def test_a_creditor_that_is_silent_takes_no_time_from_others(is_fused: bool) -> None:
    """It does not answer until the pass's time is up: its row is missed, and no other."""
    prefix = prefix_of(FULL, torch.float32, 1, is_fused)
    local = local_logits(prefix, BOTH)
    lenders = {"x": Lender(prefix, 0, starts=False), "y": Lender(prefix, 1)}
    elsewhere = RemoteSections({name: one.creditor for name, one in lenders.items()})
    runs = lent_runs(lenders, BOTH)
    lent = lent_logits(prefix, BOTH, elsewhere, runs, 20 * LATE_SECONDS)
    assert elsewhere.lacking == [0]
    assert torch.equal(lent[1:], local[1:])
    lenders["x"].line.start()
    lent = lent_logits(prefix, BOTH, elsewhere, runs)
    assert elsewhere.lacking == [], "late answers to the pass before are passed over"
    assert torch.equal(lent, local)


@both_passes
def test_a_creditor_with_too_many_queries_refuses(is_fused: bool) -> None:
    drawn = [Work(1100, 1, ("x", "x")), Work(900, 1)]
    prefix = prefix_of(FULL, torch.float32, 1, is_fused)
    local = local_logits(prefix, drawn)
    lender = Lender(prefix, 0, most=2, starts=False)
    elsewhere = RemoteSections({"x": lender.creditor})
    runs = lent_runs({"x": lender}, drawn)
    for expected in (1, 2):
        lent_logits(prefix, drawn, elsewhere, runs, LATE_SECONDS)
        assert (lender.line.posted, elsewhere.lacking) == (expected, [0])
    lent = lent_logits(prefix, drawn, elsewhere, runs)  # would wait for a minute
    assert (lender.line.posted, elsewhere.lacking) == (2, [0])
    assert torch.equal(lent[1], local[1])
    lender.line.start()
    assert torch.equal(lent_logits(prefix, drawn, elsewhere, runs), local)
    assert elsewhere.lacking == []


@both_passes
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_right_that_is_gone_makes_its_row_missed(layer: int, is_fused: bool) -> None:
    """Revoked before a layer's query arrives; the creditor's other request is not missed."""
    drawn = [Work(1600, 1, ("x", "x")), Work(1100, 1, ("x", "x")), Work(900, 1)]
    prefix = prefix_of(FULL, torch.float32, 1, is_fused)
    local = local_logits(prefix, drawn)
    lender = Lender(prefix, 0)
    runs = lent_runs({"x": lender}, drawn)

    def before(number: int) -> None:
        if number == layer:
            lender.revoke(runs[0].rights[1])

    elsewhere = RemoteSections({"x": by_call(lender, before)})
    lent = lent_logits(prefix, drawn, elsewhere, runs)
    assert elsewhere.lacking == [0]
    assert torch.equal(lent[1:], local[1:])
    assert not torch.equal(lent[0], local[0])


@both_passes
def test_an_answer_that_is_no_answer_makes_its_rows_missed(is_fused: bool) -> None:
    drawn = [Work(1100, 1, ("x", "x")), Work(900, 1)]
    prefix = prefix_of(FULL, torch.float32, 1, is_fused)
    local = local_logits(prefix, drawn)
    lender = Lender(prefix, 0)
    runs = lent_runs({"x": lender}, drawn)
    for spoil in (lambda a: a[:-4], lambda a: a + b"    ", lambda a: a[:8] + b"\x01" + a[9:]):
        answers: list[bytes] = []

        def post(query: bytes, spoil: Callable[[bytes], bytes] = spoil) -> bool:
            answers.append(spoil(lender.service.answer(DEBTOR, query)))  # noqa: B023
            return True

        creditor = called(post, lambda seconds: answers.pop(0))  # noqa: B023
        elsewhere = RemoteSections({"x": creditor})
        assert torch.equal(lent_logits(prefix, drawn, elsewhere, runs)[1], local[1])
        assert elsewhere.lacking == [0]


@both_passes
def test_a_creditor_that_raises_ends_the_step(is_fused: bool) -> None:
    prefix = prefix_of(FULL, torch.float32, 2, is_fused)
    lender = Lender(prefix, 0)

    def post(query: bytes) -> bool:
        raise ConnectionError("gone")

    elsewhere = RemoteSections({"x": called(post, lambda _: None)})
    drawn = [Work(1100, 1, ("x", "x"))]
    runs = lent_runs({"x": lender}, drawn)
    with pytest.raises(ConnectionError, match="gone"):
        lent_logits(prefix, drawn, elsewhere, runs)


def changed_first(batch: ForwardBatch) -> ForwardBatch:
    (group,) = batch.groups
    assert isinstance(group, GroupBatch)
    return replace(batch, groups=(replace(group, first_positions=group.first_positions + 1),))


@both_passes
@pytest.mark.parametrize(
    ("runs", "change", "message"),
    [
        ([SectionRun(0, "x", 1, (1, 2))], None, "follow each other from section 0 on"),
        ([SectionRun(0, "x", 0, (1,))], None, "a table does not begin where"),
        ([SectionRun(0, "x", 0, (1, 2, 3))], None, "a table does not begin where"),
        ([SectionRun(3, "x", 0, (1, 2))], None, "no such request"),
        ([SectionRun(-1, "x", 0, (1, 2))], None, "no such request"),
        ([SectionRun(0, "z", 0, (1, 2))], None, "z is not a creditor"),
        ([SectionRun(0, "x", 0, ())], None, "no section"),
        ([SectionRun(0, "x", 0, (1, 2))], changed_first, "a table does not begin where"),
    ],
)
def test_runs_that_do_not_fit_are_refused(
    runs: list[SectionRun],
    change: Callable[[ForwardBatch], ForwardBatch] | None,
    message: str,
    is_fused: bool,
) -> None:
    prefix = prefix_of(FULL, torch.float32, 1, is_fused)
    elsewhere = RemoteSections({"x": Lender(prefix, 0).creditor})
    drawn = [Work(1100, 1, ("x", "x"))]
    with pytest.raises(ValueError, match=message):
        lent_logits(prefix, drawn, elsewhere, runs, 1.0, change or (lambda batch: batch))


def test_rows_of_the_batch_are_those_of_its_requests() -> None:
    assert rows_of([Work(5, 3), Work(9, 2)], 1) == slice(3, 5)
