import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.errors import ChangeSomething
from kvell.simulator.traces.formats import json_array
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow, ideal_hit_tokens
from kvell.simulator.traces.trace import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)
OWN = {"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 2}
Read = Callable[..., list[TraceRow]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def call(text: str | bytes, *args: Any, name: str = "trace", **more: Any) -> list[TraceRow]:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_trace(path, *args, **more)

    return call


def lines(*objects: Any) -> str:
    return "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in objects)


def mooncake(at: object, tokens: object, *ids: object, out: object = 5) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": out, "hash_ids": list(ids)}


def share(*turns: tuple[object, object]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def lengths(rows: list[TraceRow]) -> list[tuple[float, int, int]]:
    return [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in rows]


class TestMooncake:
    def test_blocks_are_shared(self, read: Read) -> None:
        rows = read(lines(mooncake(27_000, 1500, 7, 8, 9), mooncake(27_500, 1100, 7, 8, 4)))
        assert lengths(rows) == [(0.0, 1500, 5), (0.5, 1100, 5)]
        assert [row.block_tokens for row in rows] == [512, 512]
        assert ideal_hit_tokens(rows) == 1024
        first, second = (PromptMaker(rows).prompt(i) for i in range(2))
        assert np.array_equal(first[:1024], second[:1024]) and first[1024] != second[1024]

    def test_lines_that_are_not_sorted_are_sorted(self, read: Read) -> None:
        rows = read(lines(mooncake(900, 5, 1), mooncake(400, 6, 2), mooncake(400, 7, 3)))
        assert lengths(rows) == [(0.0, 6, 5), (0.0, 7, 5), (0.5, 5, 5)]

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            (mooncake("now", 5, 1), "timestamp is 'now'"),
            (mooncake(-1, 5, 1), "timestamp is -1"),
            (mooncake(float("inf"), 5, 1), "timestamp is inf"),
            (mooncake(float("nan"), 5, 1), "timestamp is nan"),
            (mooncake(10**400, 5, 1), "timestamp is a whole number of 1329 bits, above 1e+13"),
            (mooncake(0, 1.5, 1), "input_length is 1.5"),
            (mooncake(0, -1, 1), "input_length is -1"),
            (mooncake(0, 1 << 31, 1), "input_length is 2147483648, above"),
            (
                mooncake(0, 512, 1, 2),
                "hash_ids are 2, more than the prompt of 512 tokens has blocks",
            ),
            (mooncake(0, 512, "x"), "hash_ids is not a list of whole numbers"),
            (mooncake(0, 512, 1, out=None), "output_length is None"),
            (OWN, "line has arrival_s, prompt_tokens, output_tokens, but the first line's"),
        ],
    )
    def test_names_line_and_field(self, read: Read, line: Any, said: str) -> None:
        with pytest.raises(ChangeSomething) as caught:
            read(lines(mooncake(0, 5, 1), "", line))
        assert str(caught.value.value).endswith("trace:3")
        assert caught.value.problem.startswith(said)


class TestTables:
    def test_azure_of_2023_and_2024(self, read: Read) -> None:
        old = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        new = "2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 00:00:01+00:00,2399,6\r\n"
        rows = read(AZURE + old)
        assert lengths(rows) == [
            (0.0, 374, 44),
            (pytest.approx(4.314579, abs=1e-6), 396, 109),
        ]
        assert [row.prompt_tokens for row in read(AZURE + new)] == [2162, 2399]

    def test_burstgpt_with_sessions_and_without(self, read: Read) -> None:
        plain = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,230,276,506,API log\n"
        rows = read(BURST + plain)
        assert lengths(rows) == [(0.0, 472, 18), (40.0, 230, 276)]
        assert [row.session for row in rows] == [None, None]
        named = "5.0,s1,1,ChatGPT,472,18,490,Conversation log\n9.5,,1,GPT-4,3,4,7,API log\n"
        rows = read(BURST_SESSIONS + named)
        assert [(row.arrival_s, row.session) for row in rows] == [(0.0, "s1"), (4.5, None)]

    def test_failed_requests_are_left_out(self, read: Read) -> None:
        failed = "5,ChatGPT,472,0,472,Conversation log\n"
        served = "45,GPT-4,230,276,506,API log\n"
        told: list[str] = []
        rows = read(BURST + failed + served + failed, notice=told.append)
        assert lengths(rows) == [(0.0, 230, 276)]
        assert told == ["left out requests without prompt or output tokens: 2"]
        with pytest.raises(ChangeSomething, match="holds no request"):
            read(BURST + failed)

    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            (AZURE + "yesterday,5,6\n", 2, "TIMESTAMP is 'yesterday'"),
            (AZURE + "\n2023-11-16 18:15:46,5\n", 3, "GeneratedTokens is None"),
            (AZURE + "2023-11-16 18:15:46,-5,6\n", 2, "ContextTokens is -5"),
            (AZURE + '2023-11-16 18:15:46,"5,6\n', 2, "line is not a line of a CSV"),
            (BURST + "nan,m,4,5,9,API log\n", 2, "Timestamp is nan"),
            (BURST + "inf,m,4,5,9,API log\n", 2, "Timestamp is inf, above 1e+10"),
            (BURST + "1,m,4.5,5,9,API log\n", 2, "Request tokens is 4.5"),
            (BURST + f"1,m,{'4' * 200_000},5,9,API log\n", 2, "line is not a line of a CSV"),
            ("time,prompt\n1,2\n", 1, "line is neither JSON nor the header of a known table"),
        ],
    )
    def test_names_line_and_column(self, read: Read, text: str, line: int, said: str) -> None:
        with pytest.raises(ChangeSomething) as caught:
            read(text)
        assert str(caught.value.value).endswith(f"trace:{line}")
        assert caught.value.problem.startswith(said) and caught.value.remedy


class TestShareGpt:
    def test_each_answer_is_a_request_that_continues_the_last(self, read: Read) -> None:
        talk = share(
            ("system", "be brief"), ("human", "one two"), ("gpt", "three"), ("human", "four five"),
            ("human", "six"), ("gpt", "seven eight"),
        )  # fmt: skip
        rows = read(json.dumps([talk, talk]), count_tokens=lambda text: len(text.split()))
        assert lengths(rows) == [(0.0, 4, 1), (0.0, 8, 2)] * 2
        assert [row.continues for row in rows] == [False, True] * 2
        assert [row.session for row in rows] == ["0", "0", "1", "1"]
        PromptMaker(rows)

    def test_what_is_no_answer_to_a_question_belongs_to_the_next_prompt(self, read: Read) -> None:
        talk = share(
            ("gpt", "a"), ("human", ""), ("gpt", "b"), ("user", "c"), ("gpt", ""), ("bard", "d e"),
            ("assistant", "f"), ("human", "last"),
        )  # fmt: skip
        [row] = read(json.dumps([share(), talk]), count_tokens=lambda text: len(text.split()))
        assert (row.prompt_tokens, row.output_tokens) == (3, 2)

    def test_half_a_surrogate_pair_is_replaced(self, read: Read) -> None:
        [row] = read('[{"conversations": [{"from": "human", "value": "\\ud83d"},'
                     ' {"from": "gpt", "value": "ok"}]}]')  # fmt: skip
        assert row.prompt_tokens == 1

    @pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 16])
    @pytest.mark.parametrize("indent", [None, 2])
    def test_pieces_of_any_size(
        self, read: Read, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None
    ) -> None:
        monkeypatch.setattr(json_array, "CHUNK_CHARS", chunk)
        talk = share(("human", 'a "quoted" \\ \u00fc \U0001f600 {[,'), ("gpt", "]}" * 50))
        text = json.dumps([{**talk, "n": [1.5e3, True, None]}] * 5, indent=indent)
        assert len(read(text)) == 5

    def test_json_lines_are_taken_too(self, read: Read) -> None:
        talk = share(("human", "a"), ("gpt", "b"))
        assert [row.session for row in read(lines(talk, talk))] == ["0", "1"]

    def test_no_more_is_read_than_is_needed(self, read: Read) -> None:
        talk = json.dumps(share(("human", "a"), ("gpt", "b")))
        assert len(read(f"[{talk}, {talk}, " + "x" * 100_000, 2)) == 2

    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            ('[{"conversations": [\n{"from": "human", "value": 3}]}]', 1,
             "[0].conversations[0].value is 3, not text"),
            ('[{"conversations": [{"from": "human"}]}]', 1,
             "[0].conversations[0].value is missing"),
            ('[{"conversations": [{"value": "x"}]}]', 1, "[0].conversations[0].from is missing"),
            ('[{"conversations": 5}]', 1, "[0].conversations is not a list of objects"),
            ('[\n{"conversations": []},\n{"id": 1}]', 3, "[1] is not an object with conversations"),
            ('[\n{"conversations": []}\n{"id": 1}]', 3, "line has '{' where ',' is expected"),
            ('[{"conversations": []},\n', 2, "line has 'its end' where an object is expected"),
            ('[{"conversations": []}', 1, "line has 'its end' where ',' is expected"),
            ("[1]", 1, "line has '1' where an object is expected"),
            ('[\n{"conversations":\n no}]', 3, "line is not JSON"),
            ('[{"conversations": [' + "x" * 100_000, 1, "line is not JSON"),
            ('[{"a": ' + "[" * 200_000, 1, "line is nested too deeply"),
        ],
    )  # fmt: skip
    def test_names_line_and_field(self, read: Read, text: str, line: int, said: str) -> None:
        with pytest.raises(ChangeSomething) as caught:
            read(text)
        assert str(caught.value.value).endswith(f"trace:{line}")
        assert caught.value.problem.startswith(said)

    def test_one_conversation_is_bounded(self, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(json_array, "MOST_ELEMENT_CHARS", 1000)
        monkeypatch.setattr(json_array, "CHUNK_CHARS", 10)
        with pytest.raises(ChangeSomething, match="more than 1000 characters"):
            read(json.dumps([share(("human", "x" * 5000))]))


class TestOwnFormat:
    @pytest.mark.parametrize("blank", ["", "  ", "\r"])
    def test_blank_lines_are_skipped_and_counted(self, read: Read, blank: str) -> None:
        assert len(read(lines(blank, OWN, blank, OWN))) == 2
        with pytest.raises(ChangeSomething, match=r"trace:4"):
            read(lines(blank, OWN, blank, "{"))

    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize(
        "text",
        [
            lines(OWN),
            lines(mooncake(0, 5, 1)),
            AZURE + "2023-11-16 18:15:46,5,6\n",
            json.dumps([share(("human", "a"), ("gpt", "b"))]),
        ],
    )
    def test_a_byte_order_mark_is_skipped(self, read: Read, text: str, packed: bool) -> None:
        marked = ("\ufeff" + text).encode()
        if packed:
            assert len(read(gzip.compress(marked), name="trace.gz")) == 1
        else:
            assert len(read(marked)) == 1

    @pytest.mark.parametrize("at", ["1e999", "Infinity", "NaN", "1e11", "1" + "0" * 400])
    def test_an_arrival_is_finite(self, read: Read, at: str) -> None:
        line = json.dumps(OWN).replace('"arrival_s": 0', f'"arrival_s": {at}')
        with pytest.raises(ChangeSomething, match="arrival_s is ") as caught:
            read(lines(OWN, line))
        assert str(caught.value.value).endswith("trace:2")
        assert len(str(caught.value)) < 300
