"""Traces: what is read, what is refused, and the tokens that are made of them."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.engine.core.journal import Journal
from kvell.engine.protocol.messages import Submit
from kvell.errors import ChangeSomething
from kvell.simulator.traces.hints import add_hints, is_wrong
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import ImageRow, TraceRow, repeat
from kvell.simulator.traces.trace import read_trace, write_trace
from tests.simulator.replays import layout_of, make_replay, row

GOOD = {"arrival_s": 0.5, "prompt_tokens": 9, "output_tokens": 2}
BLOCKS = {"block_hashes": [7, 8], "block_tokens": 4}


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


class TestReading:
    def test_fields(self, tmp_path: Path) -> None:
        path = written(tmp_path, GOOD, GOOD | BLOCKS | {"arrival_s": 1, "session": "s"})
        bare, full = read_trace(path)
        assert (bare.arrival_s, bare.prompt_tokens, bare.output_tokens) == (0.5, 9, 2)
        assert (len(bare.block_ids), bare.block_tokens, bare.session) == (0, 0, None)
        assert (full.block_ids.tolist(), full.block_tokens, full.session) == ([7, 8], 4, "s")

    @pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
    def test_round_trip(self, tmp_path: Path, name: str) -> None:
        rows = [row(9, 2, [7, 8]), row(3, 1, at=2.5)]
        path = tmp_path / name
        write_trace(path, rows)
        again = tmp_path / f"again-{name}"
        write_trace(again, read_trace(path))
        opened = gzip.decompress if name.endswith("gz") else bytes
        assert opened(again.read_bytes()) == opened(path.read_bytes())
        assert [r.block_ids.tolist() for r in read_trace(again)] == [[7, 8], []]

    def test_limit(self, tmp_path: Path) -> None:
        path = written(tmp_path, GOOD, GOOD, "not even JSON")
        assert len(read_trace(path, 2)) == 2

    def test_repeats_keep_ids_and_shift_arrivals(self) -> None:
        rows = repeat([row(9, 2, [7, 8], at=1.0), row(3, 1, at=4.0)], 3)
        assert [r.arrival_s for r in rows] == [1.0, 4.0, 4.0, 7.0, 7.0, 10.0]
        assert [len(r.block_ids) for r in rows] == [2, 0] * 3


IMAGES = {"images": [{"start": 0, "tokens": 6193, "id": 4}, {"start": 8, "tokens": 1, "id": 0}]}
TURNS = [GOOD | {"session": "s"}, GOOD | {"session": "s", "prompt_tokens": 12, "continues": True}]


class TestImagesAndTurns:
    def test_fields(self, tmp_path: Path) -> None:
        (found,) = read_trace(written(tmp_path, GOOD | IMAGES))
        assert found.images == (ImageRow(0, 6193, 4), ImageRow(8, 1, 0))
        assert found.prompt_tokens == 9
        assert not found.continues

    def test_a_turn_that_goes_on(self, tmp_path: Path) -> None:
        assert [r.continues for r in read_trace(written(tmp_path, *TURNS))] == [False, True]

    def test_round_trip(self, tmp_path: Path) -> None:
        path, again = written(tmp_path, GOOD | IMAGES, *TURNS), tmp_path / "again.jsonl"
        write_trace(again, read_trace(path))
        assert again.read_text() == path.read_text()

    @pytest.mark.parametrize(
        ("images", "said"),
        [
            ("many", "images is not a list of objects"),
            ([3], "images is not a list of objects"),
            ([{"tokens": 1, "id": 1}], "images[0].start is None"),
            ([{"start": -1, "tokens": 1, "id": 1}], "images[0].start is -1"),
            (
                [{"start": 9, "tokens": 1, "id": 1}],
                "images[0].start is 9, after the end of a prompt of 9",
            ),
            ([{"start": 1, "tokens": 0, "id": 1}], "images[0].tokens is 0"),
            ([{"start": 1, "tokens": 2, "id": 1 << 31}], "images[0].id is 2147483648, above"),
            ([{"start": 1, "tokens": 2, "id": "x"}], "images[0].id is 'x'"),
            (
                [{"start": 5, "tokens": 1, "id": 1}, {"start": 4, "tokens": 1, "id": 1}],
                "images[1].start is 4, before the image above",
            ),
        ],
    )
    def test_wrong_images(self, tmp_path: Path, images: Any, said: str) -> None:
        with pytest.raises(ChangeSomething) as caught:
            read_trace(written(tmp_path, GOOD, GOOD | {"images": images}))
        assert str(caught.value.value).endswith("trace.jsonl:2")
        assert caught.value.problem.startswith(said)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"continues": 1}, "neither true nor false"),
            ({"session": "other"}, "no earlier line"),
            ({"session": None}, "no earlier line"),
            ({"prompt_tokens": 11}, "ends at 11 tokens"),
            (BLOCKS, "block_hashes of its own"),
        ],
    )
    def test_wrong_turns(self, tmp_path: Path, change: Any, said: str) -> None:
        with pytest.raises(ChangeSomething) as caught:
            read_trace(written(tmp_path, TURNS[0], TURNS[1] | change))
        assert caught.value.problem.startswith("continues is ")
        assert said in caught.value.problem

    @pytest.mark.parametrize("hint", ["yes", 1, []])
    def test_a_hint_is_true_or_false(self, tmp_path: Path, hint: object) -> None:
        with pytest.raises(ChangeSomething, match="will_return is"):
            read_trace(written(tmp_path, GOOD | {"will_return": hint}))

    def test_hints_are_written_and_read(self, tmp_path: Path) -> None:
        hints = [True, False, None]
        path, again = (
            written(tmp_path, *(GOOD | {"will_return": hint} for hint in hints)),
            tmp_path / "again.jsonl",
        )
        write_trace(again, read_trace(path))
        assert [row.will_return for row in read_trace(again)] == hints


class TestRefusals:
    @pytest.mark.parametrize(
        ("line", "field"),
        [
            ("{", "line"),
            ([1], "line"),
            (GOOD | {"arrival_s": "now"}, "arrival_s"),
            (GOOD | {"arrival_s": -1}, "arrival_s"),
            (GOOD | {"arrival_s": 0.1}, "arrival_s"),
            (GOOD | {"prompt_tokens": 0}, "prompt_tokens"),
            (GOOD | {"prompt_tokens": True}, "prompt_tokens"),
            ({"arrival_s": 1, "prompt_tokens": 3}, "output_tokens"),
            (GOOD | {"block_hashes": [1]}, "block_tokens"),
            (GOOD | BLOCKS | {"block_hashes": ["x"]}, "block_hashes"),
            (GOOD | BLOCKS | {"block_hashes": [[1], [2, 3]]}, "block_hashes"),
            (GOOD | BLOCKS | {"block_hashes": [1, 2, 3, 4]}, "block_hashes"),
            (GOOD | BLOCKS | {"block_tokens": 8}, "block_tokens"),
            (GOOD | {"session": 3}, "session"),
        ],
    )
    def test_names_file_line_and_field(self, tmp_path: Path, line: Any, field: str) -> None:
        path = written(tmp_path, GOOD | BLOCKS, line)
        with pytest.raises(ChangeSomething) as caught:
            read_trace(path)
        assert caught.value.field == "--trace"
        assert str(caught.value.value) == f"{path}:2"
        assert caught.value.problem.startswith(field + " ")

    def test_empty_file(self, tmp_path: Path) -> None:
        with pytest.raises(ChangeSomething, match="holds no request"):
            read_trace(written(tmp_path))

    def test_no_gzip_inside(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jsonl.gz"
        path.write_bytes(b"plain text")
        with pytest.raises(ChangeSomething, match="cannot be read"):
            read_trace(path)


class TestTokens:
    def test_equal_chains_give_equal_tokens(self) -> None:
        maker = PromptMaker([row(10, 1, [900, 7]), row(12, 1, [900, 7, 3]), row(8, 1, [5])])
        first, second, third = (maker.prompt(i) for i in range(3))
        assert first.dtype == np.int32
        assert [len(first), len(second), len(third)] == [10, 12, 8]
        assert np.array_equal(first[:8], second[:8])
        assert first[8] != second[8]
        assert len(set(second.tolist())) == 12
        assert first[0] != third[0]

    def test_a_prompt_is_the_same_each_time(self) -> None:
        maker = PromptMaker([row(10, 1, [900, 7])])
        assert np.array_equal(maker.prompt(0), maker.prompt(0))

    def test_a_short_last_block_is_cut(self) -> None:
        maker = PromptMaker([row(6, 1, [1, 2]), row(8, 1, [1, 2])])
        assert np.array_equal(maker.prompt(0), maker.prompt(1)[:6])

    def test_what_has_no_id_begins_with_a_token_nobody_else_has(self) -> None:
        rows = [row(6, 2, [1]), row(6, 2, [1]), row(5, 2), row(5, 2)]
        maker = PromptMaker(rows)
        starts = [int(maker.prompt(i)[4 * len(r.block_ids)]) for i, r in enumerate(rows)]
        outputs = [maker.output_token(i, 0) for i in range(4)]
        named = set(maker.prompt(0)[:4].tolist())
        assert len({*starts, *outputs}) == 8
        assert named.isdisjoint(starts + outputs)

    def test_long_prompts_cost_ids_for_their_blocks_only(self) -> None:
        maker = PromptMaker([row(2_000_000, 5, [1]) for _ in range(100)])
        assert len(maker.prompt(99)) == 2_000_000
        assert maker.output_token(99, 0) < 1_000

    def test_too_many_ids_for_int32(self) -> None:
        with pytest.raises(ChangeSomething, match="int32"):
            PromptMaker([row(1 << 31, 1, [1, 2], size=1 << 30)])


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
