"""Loans and transfers as the map shows them: both sides name each other, and counts add up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.front.request_log import LogEntry
from kvell.front.routes import RequestTransfer, TransferTotals
from kvell.server.map.history import (
    MOST_PAIRS,
    PeerSections,
    TransferRow,
    ended_loans,
    loans_of,
    sections_lent,
    transfer_rows,
)
from kvell.vocabulary import RequestId


def part(request: str, instance: str, blocks: int, *, local: bool = False) -> RequestPlacementEntry:
    return RequestPlacementEntry(RequestId(request), instance, blocks, local)


def moving(name: str, **fields: object) -> LogEntry:
    prompt = np.arange(3, dtype="<i4").tobytes()
    made = LogEntry(RequestSpec(RequestId(name), prompt, SamplingParams()), 0.0)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_both_sides_of_a_loan_name_each_other() -> None:
    placements = {
        "mixed-0": (),
        "mixed-1": (),
        "mixed-2": (
            *(part("r", "mixed-2", 2, local=True), part("r", "mixed-0", 4)),
            *(part("s", "mixed-2", 1, local=True), part("s", "mixed-0", 1)),
            part("s", "mixed-1", 3),
        ),
    }
    loans = loans_of(placements, {"mixed-0": 10, "mixed-1": 10, "mixed-2": 10})
    debtor = PeerSections("mixed-2", 5, 2)
    assert loans["mixed-0"].lends == (debtor,) and loans["mixed-0"].borrows == ()
    assert loans["mixed-1"].lends == (PeerSections("mixed-2", 3, 1),)
    assert loans["mixed-2"].borrows == (
        PeerSections("mixed-0", 5, 2),
        PeerSections("mixed-1", 3, 1),
    )
    assert (loans["mixed-2"].borrowed, loans["mixed-0"].lent) == (8, 5)
    assert loans["mixed-0"].section_bytes == 10


def test_an_instance_without_loans_has_none() -> None:
    assert loans_of({"a": ()}, {"a": 0})["a"].lends == ()
    assert loans_of({}, {"a": 7})["a"].section_bytes == 7


NAMES = st.sampled_from("abcd")


@given(st.dictionaries(NAMES, st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=6)))
def test_as_much_is_lent_as_is_borrowed(parts: dict[str, list[tuple[str, int]]]) -> None:
    placements = {
        debtor: tuple(part("r", creditor, blocks) for creditor, blocks in entries)
        for debtor, entries in parts.items()
    }
    loans = loans_of(placements, dict.fromkeys("abcd", 1))
    assert sum(each.lent for each in loans.values()) == sum(
        each.borrowed for each in loans.values()
    )
    assert sum(each.borrowed for each in loans.values()) == sum(
        blocks for entries in parts.values() for _, blocks in entries
    )


def test_transfers_are_counted_since_the_beginning_of_the_history() -> None:
    move, pull = RequestTransfer("move", "a", "b"), RequestTransfer("pull", "b", "a")
    merged = RequestTransfer("move", "", "b")
    now = {move: TransferTotals(9), pull: TransferTotals(4), merged: TransferTotals(30)}
    rows = transfer_rows([], now, {move: TransferTotals(2), pull: TransferTotals(4)})
    assert rows == [TransferRow("move", "a", "b", 0, 7)]


def test_transfers_that_run_are_shown_first() -> None:
    entries = [
        moving("m", line="a", goes_to="b", is_migrating=True),
        moving("h", line="a", goes_to="b"),
        moving("p", line="b", pulls_from="a", pending_prompt_tokens=3),
        moving("ended", line="b", pulls_from="a"),
        moving("stays", line="a"),
    ]
    rows = transfer_rows(entries, {RequestTransfer("move", "b", "a"): TransferTotals(5)}, {})
    assert rows == [
        TransferRow("handover", "a", "b", 1, 0),
        TransferRow("move", "a", "b", 1, 0),
        TransferRow("pull", "a", "b", 1, 0),
        TransferRow("move", "b", "a", 0, 5),
    ]


def test_the_most_frequent_transfers_are_listed() -> None:
    counts = {
        RequestTransfer("move", f"i{n}", "b"): TransferTotals(n + 1) for n in range(MOST_PAIRS + 9)
    }
    rows = transfer_rows([], counts, {})
    assert len(rows) == MOST_PAIRS and rows[0].recent == MOST_PAIRS + 9


def test_loans_that_have_ended_are_listed_with_the_most_sections_of_the_history() -> None:
    samples = [{}, {("a", "b"): 2}, {("a", "b"): 5, ("c", "b"): 1}, {("a", "b"): 1, ("c", "b"): 1}]
    assert ended_loans({("c", "b"): 1}, samples) == [TransferRow("loan", "a", "b", 0, 5)]
    assert ended_loans({("a", "b"): 3, ("c", "b"): 1}, samples) == [], "they are shown as loans now"
    assert ended_loans({}, []) == []


@given(st.dictionaries(NAMES, st.lists(st.tuples(NAMES, st.integers(1, 9)), max_size=6)))
def test_loans_of_a_sample_are_those_that_its_chart_adds_up(
    parts: dict[str, list[tuple[str, int]]],
) -> None:
    placements = {
        debtor: tuple(part("r", creditor, blocks) for creditor, blocks in entries)
        for debtor, entries in parts.items()
    }
    loans = loans_of(placements, dict.fromkeys("abcd", 1))
    pairs = sections_lent(loans)
    for name, each in loans.items():
        assert each.lent == sum(count for (creditor, _), count in pairs.items() if creditor == name)
        assert each.borrowed == sum(count for (_, debtor), count in pairs.items() if debtor == name)
