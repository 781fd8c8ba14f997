"""Requests that move between two real engines, over tiny models of every kind of group."""

import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Submit, Tokens
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import audit
from kvell.mempool.place import PoolPlace, make_folder
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import prompt_ids
from tests.models.serving.test_models_pooling_served import engine_of, every_case

PATIENCE_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, presence_penalty=1.0
)
PROMPTS = {f"q{length}": prompt_ids(length) for length in (3, 90, 1, 64, 131)}


class Pair:
    """Two engines, and what either said of each request."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}
        self.moved: set[str] = set()

    def submit(self, name: str, prompt: Sequence[int], at: int, params: SamplingParams) -> None:
        """Give a request to one engine, which hands it to the other."""
        self.tokens[name] = []
        ids = np.asarray(prompt, "<i4").tobytes()
        command = Submit(RequestId(name), ids, params, goes_to="ab"[1 - at])
        self.take(self.engines[at].handle(command))

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert event.first_index == len(self.tokens[event.request_id])
                self.tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished) and event.reason == "moved":
                self.moved.add(event.request_id)
            elif isinstance(event, Finished):
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event

    def run(self) -> None:
        """Step whoever has work until all requests have ended."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.ends) < len(self.tokens) or len(self.moved) < len(self.tokens):
            assert time.monotonic() < deadline, (self.ends, self.moved)
            works = False
            for engine in self.engines:
                self.take(engine.woken())
                if engine.has_work():
                    works = True
                    self.take(engine.step())
                    memory = engine.core.memory
                    assert audit(memory.layout, memory.snapshot()) == []
            if not works:
                wakes = [engine.wakes() for engine in self.engines]
                select.select([one for one in wakes if one is not None], [], [], 1.0)


@contextmanager
def pair_of(architecture: str, is_fused: bool, folder: Path) -> Iterator[Pair]:
    make_folder(folder)
    engines = [
        engine_of(architecture, is_fused, 8 * MIB, pool_place=PoolPlace(name, folder))
        for name in "ab"
    ]
    try:
        yield Pair(engines)
    finally:
        for engine in engines:
            engine.close()


def alone(architecture: str, is_fused: bool, params: SamplingParams) -> dict[str, list[int]]:
    """Answers of one engine."""
    engine = engine_of(architecture, is_fused)
    found: dict[str, list[int]] = {}
    for name, prompt in PROMPTS.items():
        ids = np.asarray(prompt, "<i4").tobytes()
        engine.handle(Submit(RequestId(name), ids, params))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


@every_case
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_one_engine(
    architecture: str, is_fused: bool, params: SamplingParams, tmp_path: Path
) -> None:
    """In both directions at once; the second round finds the first one's pages on both sides."""
    expected = alone(architecture, is_fused, params)
    with pair_of(architecture, is_fused, tmp_path) as pair:
        for turn in range(2):
            for at, (name, prompt) in enumerate(PROMPTS.items()):
                pair.submit(f"{name}/{turn}", prompt, at % 2, params)
            pair.run()
            told = {name: pair.tokens[f"{name}/{turn}"] for name in PROMPTS}
            assert told == expected
        assert len(pair.moved) == 2 * len(PROMPTS)
        for engine in pair.engines:
            assert not any(engine.core.memory.snapshot().used)
            assert not engine.has_work()
