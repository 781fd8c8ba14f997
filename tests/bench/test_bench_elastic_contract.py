"""The contract's bench: its load, its samples and its verdicts."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import pairwise

import pytest

from bench.elastic.contract import Given, Seen, lines, series, verdicts
from bench.elastic.mixed_load import Asked, Mix, MixedLoad, Tally, figures
from bench.elastic.process_sizes import Sample, Sampler, import_bytes, tree_bytes
from kvell.clock import MonotonicClock
from kvell.errors import KvellError
from kvell.load.http.client import HttpClient
from kvell.load.http.wire import ConnectionFailed, RefusedResponse
from kvell.vocabulary import MIB
from tests.load.virtual_time import run_virtually

LONGEST = 512
HOLDS = """
import subprocess, sys
held = bytearray(b"x" * (int(sys.argv[1]) << 20))
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[2:3]],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.readline()
"""


class TestMix:
    def asked(self, seed: int = 0, count: int = 400) -> list[Asked]:
        mix = Mix(seed, LONGEST, 1000)
        return [mix.next() for _ in range(count)]

    def test_prompts_have_every_length_and_all_fit(self) -> None:
        asked = self.asked()
        lengths = [len(one.prompt) for one in asked]
        assert (min(lengths), max(lengths)) == (1, LONGEST - 1)
        assert len({int(math.log2(length)) for length in lengths}) == 9, "of every power of two"
        assert all(1 <= one.output_tokens <= LONGEST - len(one.prompt) for one in asked)
        assert all(256 <= token < 1000 for one in asked for token in one.prompt)

    def test_a_seed_asks_the_same(self) -> None:
        assert self.asked(3, 20) == self.asked(3, 20) != self.asked(4, 20)

    def test_some_begin_alike_and_some_clients_hang_up(self) -> None:
        asked = self.asked()
        pairs = [(a.prompt, b.prompt) for a, b in pairwise(asked)]
        alike = [b for a, b in pairs if len(b) > 20 and a[:8] == b[:8]]
        assert 10 < len(alike) < 200
        left = [one for one in asked if one.hangs_up is not None]
        assert 5 < len(left) < 60
        assert all(one.output_tokens > 2 for one in left)


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


class Client(HttpClient):
    """Answers as asked; ``fails`` breaks every third request."""

    def __init__(self, fails: Exception | None = None, short: int = 0) -> None:
        self.fails, self.short = fails, short
        self.asked = list[int]()
        self.closed = 0

    async def answer_to(self, path: str) -> tuple[int, bytes]:
        raise AssertionError(path)

    async def stream_of(self, path: str, body: bytes) -> AsyncGenerator[tuple[float, bytes], None]:
        asked = json.loads(body)
        self.asked.append(len(asked["prompt"]))
        if self.fails is not None and len(self.asked) % 3 == 0:
            raise self.fails
        count = asked["max_tokens"] - self.short
        now = asyncio.get_running_loop().time
        try:
            for _ in range(count):
                await asyncio.sleep(0.001)
                yield now(), event({"choices": [{"text": " a", "finish_reason": None}]})
            yield now(), event({"choices": [{"text": "", "finish_reason": "length"}]})
            yield now(), event({"choices": [], "usage": {"completion_tokens": count}})
            yield now(), b"data: [DONE]\n\n"
        finally:
            self.closed += 1


class TestMixedLoad:
    def run(self, client: Client, workers: int = 3, seconds: float = 4.0) -> Tally:
        load = MixedLoad(client, "m", Mix(1, LONGEST, 1000))
        return run_virtually(load.run(workers, seconds))

    def test_every_answer_counts_once(self) -> None:
        client = Client()
        tally = self.run(client)
        assert tally.completed + tally.hung_up == len(client.asked) == client.closed > 10
        assert not tally.failures
        assert tally.hung_up > 0
        assert (tally.shortest_prompt, tally.longest_prompt) == (1, LONGEST - 1)
        told = figures(tally)
        assert told["completed"] == tally.completed
        assert 0 <= told["ttft_seconds_p50"] <= told["ttft_seconds_max"]

    @pytest.mark.parametrize("fails", [RefusedResponse(429, "busy"), ConnectionFailed("gone")])
    def test_a_refusal_is_a_failure_by_its_reason(self, fails: Exception) -> None:
        tally = self.run(Client(fails))
        assert tally.failures[str(fails)] > 3
        assert tally.completed > 0

    def test_an_answer_that_is_too_short_is_a_failure(self) -> None:
        tally = self.run(Client(short=1))
        assert any("instead of" in reason for reason in tally.failures)

    def test_nothing_asked_gives_no_times(self) -> None:
        assert figures(Tally())["ttft_seconds_max"] is None


class TestSizes:
    def test_a_tree_is_all_its_processes(self) -> None:
        command = [sys.executable, "-c", HOLDS, "24", "40", HOLDS]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
            assert process.stdout is not None
            process.stdout.readline()
            sampler = Sampler(process.pid, MonotonicClock(), 0.01)
            size_bytes = tree_bytes(process.pid)
            while len(sampler.samples) < 3:
                time.sleep(0.001)
            samples = sampler.stop()
            process.kill()
        assert 64 * MIB < size_bytes < 120 * MIB
        assert all(64 * MIB < sample.size_bytes < 120 * MIB for sample in samples[:3])
        assert samples[0].seconds < samples[1].seconds < samples[2].seconds
        assert tree_bytes(process.pid) == 0

    def test_imports_are_measured_in_a_process_of_their_own(self) -> None:
        small, large = import_bytes(["json"]), import_bytes(["numpy"])
        assert 0 < small < large
        with pytest.raises(KvellError, match="no_such_module"):
            import_bytes(["no_such_module"])


GIVEN = Given(1000 * MIB, 200 * MIB, 50 * MIB, 150 * MIB)
SEEN = Seen(
    1400 * MIB,
    4096,
    (5.4, 3.0, 3.6),
    [Sample(0.0, 100 * MIB), Sample(1.0, 1390 * MIB), Sample(12.0, 1200 * MIB)],
    Tally(completed=9, shortest_prompt=1, longest_prompt=4095),
)


class TestVerdicts:
    def test_what_is_kept(self) -> None:
        assert GIVEN.most_bytes == 1464 * MIB
        assert replace(GIVEN, memory_bytes=10_000 * MIB).most_bytes == 10_700 * MIB
        assert all(verdicts(GIVEN, SEEN).values())

    @pytest.mark.parametrize(
        ("seen", "broken"),
        [
            (replace(SEEN, contract_bytes=1389 * MIB), "never_above_the_contract"),
            (replace(SEEN, contract_bytes=1465 * MIB), "the_contract_is_tight"),
            (replace(SEEN, first_token_seconds=(6.0, 5.1)), "first_token_in_time"),
            (replace(SEEN, max_model_len=4097), "from_one_token_to_the_longest"),
            (
                replace(
                    SEEN,
                    tally=Tally(
                        shortest_prompt=1, longest_prompt=4095, failures=Counter({"no": 1})
                    ),
                ),
                "nothing_refused",
            ),
        ],
    )
    def test_what_is_not(self, seen: Seen, broken: str) -> None:
        kept = verdicts(GIVEN, seen)
        assert [name for name, is_kept in kept.items() if not is_kept] == [broken]
        assert f"  NOT KEPT: {broken}" in lines(GIVEN, seen, kept)

    def test_a_series_has_the_largest_of_each_interval(self) -> None:
        assert series(SEEN.samples) == [[0.0, 1390.0], [10.0, 1200.0]]
