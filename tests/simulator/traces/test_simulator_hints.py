"""Hints derived from the file: who returns, which hints are wrong, and where they arrive."""

from dataclasses import replace

import pytest

from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Submit
from kvell.simulator.traces.hints import add_hints, is_wrong
from kvell.simulator.traces.rows import TraceRow
from tests.simulator.replays import layout_of, make_replay, row


def told(*rows: TraceRow, wrong: float = 0.0) -> list[bool | None]:
    return [each.will_return for each in add_hints(rows, wrong)]


def test_who_shares_the_last_full_block_with_a_later_row_returns() -> None:
    first, longer, other = row(8, 1, [1, 2]), row(12, 1, [1, 2, 3]), row(8, 1, [1, 9])
    assert told(first, longer, other) == [True, False, False]


def test_a_block_that_is_not_full_does_not_count() -> None:
    assert told(row(7, 1, [1, 2]), row(8, 1, [1, 3])) == [True, False]
    assert told(row(3, 1, [1]), row(3, 1, [1])) == [False, False]


def test_rows_without_blocks_return_only_as_turns() -> None:
    turn = replace(row(5, 2), session="s")
    goes_on = replace(turn, prompt_tokens=9, continues=True)
    assert told(turn, row(5, 2), goes_on) == [True, False, False]
    assert told(turn, replace(turn, prompt_tokens=9)) == [False, False], "begins anew"


def test_a_part_is_wrong_and_always_the_same() -> None:
    rows = [row(4, 1, [index]) for index in range(2_000)]
    wrong = [bool(hint) for hint in told(*rows, wrong=0.1)]
    assert 150 < sum(wrong) < 250
    assert wrong == [is_wrong(index, 0.1) for index in range(2_000)]
    assert not any(told(*rows))
    assert all(told(*rows, wrong=1.0))


@pytest.mark.parametrize("hint", [None, True, False])
def test_the_hint_of_a_row_is_in_the_journal_of_its_replay(hint: bool | None) -> None:
    journal = Journal()
    make_replay(layout_of((0, 1)), [replace(row(8, 2), will_return=hint)], journal=journal)
    (command,) = [entry for entry in journal.entries if isinstance(entry, Submit)]
    assert command.spec.sampling.will_return is hint
