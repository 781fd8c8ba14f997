"""The fixed server keeps its times; tools' reports are read; verdicts follow the bounds."""

import asyncio
import json

import pytest
from starlette.testclient import TestClient

from bench.load.commands import Shape
from bench.load.fixed_server import MODEL, Latencies, answer_events, build_app
from bench.load.reports import Figures, ToolFailed, of_kvell, of_vllm
from bench.load.tools import even_rows, whole_run
from bench.load.verdicts import against_known, against_others, known, spread
from kvell.load.answers import AnswerReader
from tests.load.virtual_time import run_virtually

LATENCIES = Latencies(0.5, 0.05)
SHAPE = Shape(requests=10, rate=4.0, prompt_tokens=64, output_tokens=20)


async def heard(delay_seconds: float, count: int, *, is_chat: bool) -> AnswerReader:
    """An answer whose server woke up late, as its client hears it."""
    reader, loop = AnswerReader(), asyncio.get_running_loop()
    arrived_seconds = loop.time()
    await asyncio.sleep(delay_seconds)
    async for event in answer_events(arrived_seconds, LATENCIES, count, 7, is_chat=is_chat):
        reader.feed(loop.time() - arrived_seconds, event)
    return reader


class TestFixedServer:
    @pytest.mark.parametrize("is_chat", [False, True])
    def test_every_token_comes_at_its_time(self, is_chat: bool) -> None:
        reader = run_virtually(heard(0.0, 4, is_chat=is_chat))
        assert reader.problem() is None
        assert reader.content_seconds == pytest.approx([0.5, 0.55, 0.6, 0.65])
        assert (reader.output_tokens, reader.usage and reader.usage.prompt_tokens) == (4, 7)

    def test_a_delay_is_made_up_for(self) -> None:
        reader = run_virtually(heard(0.57, 4, is_chat=False))
        assert reader.content_seconds == pytest.approx([0.57, 0.57, 0.6, 0.65])

    def test_it_speaks_openais_api(self) -> None:
        client = TestClient(build_app(Latencies(0.0, 0.0)))
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
        assert client.get("/health").status_code == 200
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        whole = client.post("/v1/completions", json=body).json()
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert whole["choices"][0]["text"] == " word word"
        chat = client.post("/v1/chat/completions", json=body | {"stream": True}).text
        assert chat.count("data: ") == 2 + 1 + 1
        assert chat.endswith("data: [DONE]\n\n")


class TestReports:
    def test_of_kvell(self) -> None:
        spreads = {f"{n}_seconds": {"mean": v} for n, v in (("ttft", 1), ("tpot", 2), ("e2e", 3))}
        found = of_kvell({"completed": 10, **spreads}, SHAPE)
        assert found == {"ttft_seconds": 1, "tpot_seconds": 2, "e2e_seconds": 3}

    def test_half_a_run_is_none(self) -> None:
        with pytest.raises(ToolFailed, match="9 of 10 requests"):
            of_vllm({"completed": 9}, SHAPE)

    def test_requests_are_evenly_spaced(self) -> None:
        rows = even_rows(SHAPE)
        assert [row.arrival_s for row in rows[:3]] == [0.0, 0.25, 0.5]
        assert {(row.prompt_tokens, row.output_tokens) for row in rows} == {(64, 20)}


def runs(*ttfts: float) -> list[Figures]:
    return [{"ttft_seconds": ttft} for ttft in ttfts]


class Failing:
    """A tool that loses a request in its first runs."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.seeds: list[int] = []

    def run(self, base_url: str, model: str, shape: Shape, seed: int) -> Figures:
        self.seeds.append(seed)
        if len(self.seeds) <= self.failures:
            raise ToolFailed("39 of 40 requests have an answer")
        return {"ttft_seconds": 1.0, "tpot_seconds": 0.1, "e2e_seconds": 2.0}


class TestWholeRuns:
    def test_a_run_that_lost_a_request_is_made_again_with_other_prompts(self) -> None:
        tool, told = Failing(2), list[str]()
        assert whole_run(tool, "", "", SHAPE, 7, told.append)["ttft_seconds"] == 1.0
        assert len(set(tool.seeds)) == 3
        assert told == ["again: 39 of 40 requests have an answer"] * 2

    def test_who_never_answers_all_has_failed(self) -> None:
        tool = Failing(9)
        with pytest.raises(ToolFailed, match="39 of 40"):
            whole_run(tool, "", "", SHAPE, 7, lambda _: None)
        assert len(tool.seeds) == 3


class TestVerdicts:
    def test_known_times(self) -> None:
        assert known(LATENCIES, SHAPE)["e2e_seconds"] == pytest.approx(0.5 + 19 * 0.05)

    def test_three_per_cent_of_what_is_known(self) -> None:
        found = {"kvell": runs(0.5, 0.514, 0.9), "other": runs(0.52)}
        ours, theirs = against_known(found, {"ttft_seconds": 0.5})
        assert (ours.found, ours.agrees) == (0.514, True)
        assert theirs.agrees is False
        assert (ours.tool, theirs.tool, theirs.against) == ("kvell", "other", "known")

    def test_twice_the_larger_spread_of_two_tools(self) -> None:
        found = {"kvell": runs(1.0, 1.0, 1.0), "other": runs(1.1, 1.15, 1.2)}
        [verdict] = against_others(found)
        assert verdict.allowed == pytest.approx(2 * 0.1 / 1.15)
        assert verdict.difference == pytest.approx(0.15 / 1.15)
        assert verdict.agrees
        assert (verdict.tool, verdict.against) == ("kvell", "other")
        [verdict] = against_others({"kvell": runs(1.0, 1.0), "other": runs(1.1, 1.1)})
        assert not verdict.agrees

    def test_spread_and_json(self) -> None:
        assert spread(runs(1.0, 2.0, 4.0), "ttft_seconds") == 1.5
        [verdict] = against_known({"kvell": runs(0.5)}, {"ttft_seconds": 0.5})
        assert json.loads(json.dumps(verdict.as_json()))["agrees"] is True
