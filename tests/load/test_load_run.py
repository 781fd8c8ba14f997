"""A whole run: the preflight, and the server's counters."""

import asyncio

import pytest

from kvell.errors import ChangeSomething
from kvell.load.driver import Load, LoadResult, measure
from kvell.load.http.client import served_model
from kvell.load.http.scrape import Counters, parse, scrape
from kvell.load.http.wire import ConnectionFailed, Wire
from kvell.load.prompts import text_prompts
from tests.load.loads import row
from tests.load.virtual_time import FakeServer, run_virtually

URL = "http://server"


def chosen(server: FakeServer, wanted: str | None) -> str:
    return asyncio.run(served_model(server, URL, wanted))


class Silent(FakeServer):
    async def answer_to(self, path: str) -> tuple[int, bytes]:
        raise ConnectionFailed(f"no connection for {path}")


class Answering(FakeServer):
    def __init__(self, status: int, body: bytes = b"") -> None:
        super().__init__()
        self._status, self._body = status, body

    async def answer_to(self, path: str) -> tuple[int, bytes]:
        return self._status, self._body


class TestModel:
    def test_the_only_one(self) -> None:
        assert chosen(FakeServer(), None) == "fake"

    def test_one_of_several(self) -> None:
        server = FakeServer(models=("a", "b"))
        assert chosen(server, "b") == "b"
        with pytest.raises(ChangeSomething, match=r"--model=: cannot be guessed .*give a or b"):
            chosen(server, None)

    def test_an_unknown_one(self) -> None:
        with pytest.raises(ChangeSomething, match=r"--model=c: is not served at .*; use a or b"):
            chosen(FakeServer(models=("a", "b")), "c")

    @pytest.mark.parametrize(
        "server", [Answering(404), Answering(200, b"{}"), Answering(200, b'{"data": []}')]
    )
    def test_a_server_that_lists_none_is_believed(self, server: FakeServer) -> None:
        assert chosen(server, "any") == "any"
        with pytest.raises(ChangeSomething, match="give the name it serves"):
            chosen(server, None)

    def test_nobody_there(self) -> None:
        with pytest.raises(ChangeSomething, match=f"--base-url={URL}: does not answer: no conn"):
            chosen(Silent(), "a")

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_key_is_wanted(self, status: int) -> None:
        with pytest.raises(ChangeSomething, match=f"--api-key=…: .*HTTP {status}: who are you"):
            chosen(Answering(status, b'{"error": {"message": "who are you"}}'), "a")


KVELL = """# HELP kvell:prefix_cache_queries_total Prompt tokens looked up.
# TYPE kvell:prefix_cache_queries_total counter
kvell:prefix_cache_queries_total{model_name="a"} %d
# TYPE kvell:prefix_cache_hits_total counter
kvell:prefix_cache_hits_total{model_name="a"} %d
# TYPE kvell:num_preemptions_total counter
kvell:num_preemptions_total{model_name="a"} %d
"""


def histogram(name: str, total: float, *buckets: tuple[str, int]) -> str:
    lines = [f"# TYPE kvell:{name} histogram"]
    lines += [f'kvell:{name}_bucket{{le="{bound}",model_name="a"}} {n}' for bound, n in buckets]
    return "\n".join([*lines, f'kvell:{name}_sum{{model_name="a"}} {total}', ""])


FIRST_TOKEN = "time_to_first_token_seconds"
EARLY = histogram(FIRST_TOKEN, 1.0, ("0.1", 0), ("1.0", 2), ("+Inf", 2))
LATE = histogram(FIRST_TOKEN, 4.0, ("0.1", 4), ("1.0", 11), ("+Inf", 12))


class TestHistograms:
    def test_what_a_run_observed(self) -> None:
        found = parse(KVELL % (9, 1, 0) + LATE).since(parse(KVELL % (9, 1, 0) + EARLY))
        first = found["ttft_seconds"]
        assert first["mean"] == pytest.approx(0.3)
        assert first["p50"] == pytest.approx(0.1 + 0.9 / 5), "the fifth of ten values"
        assert first["p99"] == 1.0, "above the last bound nothing is known"

    def test_a_server_with_the_other_prefix_says_the_same(self) -> None:
        ours, theirs = parse(LATE), parse(LATE.replace("kvell:", "vllm:"))
        assert ours == theirs
        assert ours.histograms[FIRST_TOKEN].count == 12

    def test_engines_are_summed(self) -> None:
        text = EARLY + "".join(
            f"kvell:{FIRST_TOKEN}_{end} {value}\n"
            for end, value in (
                ('bucket{le="0.1",model_name="b"}', 1),
                ('bucket{le="1.0",model_name="b"}', 1),
                ('bucket{le="+Inf",model_name="b"}', 1),
                ('sum{model_name="b"}', 0.5),
            )
        )
        found = parse(text).histograms[FIRST_TOKEN]
        assert (found.count, found.total) == (3, 1.5)

    def test_a_series_that_comes_with_its_first_value_was_empty(self) -> None:
        found = parse(KVELL % (9, 1, 0) + EARLY).since(parse(KVELL % (9, 1, 0)))
        assert found["ttft_seconds"]["mean"] == 0.5

    def test_nothing_observed_or_a_restart_is_left_out(self) -> None:
        assert "ttft_seconds" not in parse(LATE).since(parse(LATE))
        assert "ttft_seconds" not in parse(KVELL % (1, 0, 0) + EARLY).since(parse(LATE))
        assert "ttft_seconds" not in parse(LATE).since(parse(""))

    def test_tokens_per_step(self) -> None:
        name = "iteration_tokens_total"
        before = histogram(name, 10, ("8.0", 2), ("+Inf", 2))
        after = histogram(name, 100, ("8.0", 3), ("+Inf", 5))
        found = parse(after).since(parse(before))
        assert (found["steps"], found["tokens_per_step"]) == (3, 30)


class TestCounters:
    def test_tokens_and_draft_tokens(self) -> None:
        def text(prompt: int, output: int, drafted: int, accepted: int) -> str:
            return (
                f"vllm:prompt_tokens_total {prompt}\nvllm:generation_tokens_total {output}\n"
                f"vllm:spec_decode_num_draft_tokens_total {drafted}\n"
                f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
            )

        found = parse(text(30, 9, 20, 6)).since(parse(text(10, 4, 10, 1)))
        assert found == {"prompt_tokens": 20, "output_tokens": 5, "draft_acceptance_rate": 0.5}

    def test_of_kvell_and_vllm(self) -> None:
        ours = parse(KVELL % (100, 40, 3))
        theirs = parse((KVELL % (100, 40, 3)).replace("kvell:", "vllm:"))
        assert ours == theirs
        assert len(ours.values) == 3

    def test_labels_are_summed(self) -> None:
        text = (
            'vllm:num_preemptions_total{engine="0"} 2\nvllm:num_preemptions_total{engine="1"} 5\n'
        )
        assert parse(text).values == {"num_preemptions_total": 7}

    def test_what_a_run_added(self) -> None:
        before, after = parse(KVELL % (100, 40, 3)), parse(KVELL % (300, 90, 5))
        assert after.since(before) == {"prefix_cache_hit_rate": 0.25, "preemptions": 2}

    def test_what_is_unknown_is_left_out(self) -> None:
        none, some = Counters({}), parse(KVELL % (300, 90, 5))
        assert none.since(some) == some.since(none) == none.since(none) == {}
        assert some.since(some) == {"preemptions": 0}

    def test_a_restart_in_between(self) -> None:
        assert parse(KVELL % (9, 1, 0)).since(parse(KVELL % (100, 40, 3))) == {}

    @pytest.mark.parametrize("text", ["", "<html>", "vllm:num_preemptions_total\n", '{"a": 1}'])
    def test_what_is_no_metrics(self, text: str) -> None:
        assert parse(text).values == {}

    def test_servers_without(self) -> None:
        for server in (Silent(), FakeServer(), Answering(500, b"vllm:num_preemptions_total 3\n")):
            assert asyncio.run(scrape(server)).values == {}


def test_a_run() -> None:
    server = FakeServer(metrics=[KVELL % (100, 40, 3), KVELL % (300, 90, 5)])
    rows, told = [row(), row(0.1), row(0.2)], list[tuple[int, int]]()
    work = measure(
        server,
        URL,
        Wire(""),
        text_prompts(rows, 0),
        Load(rows, [None] * 3),
        lambda ended, of: told.append((ended, of)),
    )
    found: LoadResult = run_virtually(work)
    assert found.model == server.asked[0].body["model"] == "fake"
    assert found.server == {"prefix_cache_hit_rate": 0.25, "preemptions": 2}
    assert [one.is_complete for one in found.outcomes] == [True] * 3
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert server.metrics == []
