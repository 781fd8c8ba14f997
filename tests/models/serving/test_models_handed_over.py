"""Requests that move between two real engines, over tiny models of every kind of group."""

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvell.cluster.steering.placements import Placement
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Migrate, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import audit
from kvell.mempool.rendezvous import (
    PD_CACHINGS,
    FolderRendezvous,
    PageTransport,
    PdCaching,
    TransferMethod,
    make_folder,
)
from kvell.vocabulary import MIB, RequestId
from tests.models.cases import covering
from tests.models.harness import prompt_ids
from tests.models.serving.test_models_pooling_served import MARKED, engine_of

PATIENCE_SECONDS = 60.0
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, presence_penalty=1.0
)
SAMPLING = [pytest.param(GREEDY, id="greedy"), pytest.param(SEEDED, id="seeded")]
PROMPTS = {f"q{length}": prompt_ids(length) for length in (3, 90, 1, 64, 131)}


class Pair:
    """Several engines, and what any of them said of each request."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Finished] = {}
        self.moved: list[str] = []

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        at: int,
        params: SamplingParams,
        goes_to: str | None = None,
        pulls_from: str = "",
        model: str = "",
        placement: Placement = (),
    ) -> None:
        """Give a request to an engine, which hands it to the other, or to another, or to none."""
        self.tokens[name] = []
        ids = np.asarray(prompt, "<i4").tobytes()
        to = "ab"[1 - at] if goes_to is None else goes_to
        command = Submit(
            RequestSpec(RequestId(name), ids, params, model=model),
            goes_to=to,
            pulls_from=pulls_from,
            placement=placement,
        )
        self.take(self.engines[at].handle(command))

    def migrate(self, name: str, at: int, goes_to: str) -> None:
        """Let another engine go on with a request."""
        self.take(self.engines[at].handle(Migrate(RequestId(name), 0, goes_to)))

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                assert event.first_index == len(self.tokens[event.request_id])
                self.tokens[event.request_id].extend(event.token_ids)
            elif isinstance(event, Finished) and event.reason == "moved":
                self.moved.append(event.request_id)
            elif isinstance(event, Finished):
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event

    def run(self, until: Callable[[], bool] | None = None, listens_seconds: float = 0.0) -> None:
        """Step whoever has work until all requests have ended and nothing is held for others.

        :param listens_seconds: longest wait for news before each step: real steps are not as short.
        """
        until = until or (lambda: len(self.ends) == len(self.tokens) and not self.holds())
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until():
            assert time.monotonic() < deadline, (self.ends, self.moved)
            works = False
            self.listen(listens_seconds)
            for engine in self.engines:
                self.take(engine.woken())
                if engine.has_work():
                    works = True
                    self.take(engine.step())
                    memory = engine.core.memory
                    assert audit(memory.layout, memory.snapshot()) == []
            if not works:
                self.listen(0.1)

    def listen(self, seconds: float) -> None:
        """Wait until there are news for any engine."""
        wakes = [engine.wakes() for engine in self.engines]
        select.select([one for one in wakes if one is not None], [], [], seconds)

    def holds(self) -> bool:
        """Whether an engine holds pages for others."""
        handovers = (engine.core.pool for engine in self.engines)
        return any(one.holds_pages for one in handovers)

    def check_pools(self) -> None:
        """Nobody uses a page any more."""
        for engine in self.engines:
            assert not any(engine.core.memory.snapshot().used)
            assert not engine.has_work()


@contextmanager
def pair_of(
    architecture: str,
    is_fused: bool,
    folder: Path,
    transport: PageTransport = "memory",
    pd_caching: PdCaching = 3,
    names: str = "ab",
    method: TransferMethod = "cheapest",
) -> Iterator[Pair]:
    make_folder(folder)
    engines = [
        engine_of(
            architecture,
            is_fused,
            8 * MIB,
            pool_place=FolderRendezvous(
                name, folder, pd_caching=pd_caching, transport=transport, method=method
            ),
        )
        for name in names
    ]
    try:
        yield Pair(engines)
    finally:
        for engine in engines:
            engine.close()


def alone(
    architecture: str,
    is_fused: bool,
    params: SamplingParams,
    prompts: Mapping[str, Sequence[int]] = PROMPTS,
) -> dict[str, list[int]]:
    """Answers of one engine, asked once for all tests."""
    key = architecture, is_fused, repr(params), repr(prompts)
    if key not in _alone:
        _alone[key] = _answers(engine_of(architecture, is_fused), params, prompts)
    return _alone[key]


_alone: dict[tuple[str, bool, str, str], dict[str, list[int]]] = {}


def _answers(
    engine: Engine, params: SamplingParams, prompts: Mapping[str, Sequence[int]]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        ids = np.asarray(prompt, "<i4").tobytes()
        engine.handle(Submit(RequestSpec(RequestId(name), ids, params)))
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


@covering({"architecture,is_fused": MARKED, "params": SAMPLING}, together=1)
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
        assert sorted(pair.moved) == sorted(pair.tokens)
        pair.check_pools()


FIRST = prompt_ids(90)
MORE = prompt_ids(12, seed=3)
TRANSPORTS = ["memory", "tcp"]
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)
case_and_transport = covering(
    {"architecture,is_fused": MARKED, "transport": TRANSPORTS}, together=1
)


@covering({"architecture,is_fused": MARKED, "pd_caching": PD_CACHINGS, "transport": TRANSPORTS})
def test_a_second_turn_in_every_mode(
    architecture: str,
    is_fused: bool,
    pd_caching: PdCaching,
    transport: PageTransport,
    tmp_path: Path,
) -> None:
    """Its hit joins what either side has computed of the first turn, as the mode says."""
    [answer] = alone(architecture, is_fused, GREEDY, {"first": FIRST}).values()
    second = [*FIRST, *answer, *MORE]
    expected = alone(architecture, is_fused, SEEDED, {"second": second})
    with pair_of(architecture, is_fused, tmp_path, transport, pd_caching) as pair:
        pair.submit("first", FIRST, 0, GREEDY)
        pair.run()
        assert pair.tokens["first"] == answer
        pair.submit("second", second, 0, SEEDED)
        pair.run()
        assert pair.tokens["second"] == expected["second"]
        assert pair.moved == ["first", "second"]
        cached = pair.ends["second"].cached_tokens
        known = [0, len(FIRST), len(FIRST), len(FIRST) + len(answer) - 1][pd_caching]
        assert cached == known
        pair.check_pools()


@covering({"architecture,is_fused": MARKED, "made": [1, 5, 10]}, together=1)
def test_a_request_migrates_in_the_middle_of_its_answer(
    architecture: str, is_fused: bool, made: int, tmp_path: Path
) -> None:
    """With its penalties, beside another that stays."""
    prompts = {"goes": FIRST, "stays": prompt_ids(40, seed=2)}
    params = replace(SEEDED, max_tokens=40)
    expected = alone(architecture, is_fused, params, prompts)
    with pair_of(architecture, is_fused, tmp_path) as pair:
        for name, prompt in prompts.items():
            pair.submit(name, prompt, 0, params, goes_to="")
        pair.run(lambda: len(pair.tokens["goes"]) >= made)
        pair.migrate("goes", 0, "b")
        pair.run(lambda: bool(pair.moved), listens_seconds=1.0)
        assert made < len(pair.tokens["goes"]) < 40, "it went on while it was copied"
        pair.run()
        assert pair.tokens == expected
        assert pair.moved == ["goes"]
        pair.check_pools()


@case_and_transport
def test_a_prefix_is_pulled_from_a_third_instance(
    architecture: str, is_fused: bool, transport: PageTransport, tmp_path: Path
) -> None:
    """One computes what follows, and the other goes on."""
    [answer] = alone(architecture, is_fused, GREEDY, {"first": FIRST}).values()
    second = [*FIRST, *answer, *MORE]
    expected = alone(architecture, is_fused, SEEDED, {"second": second})
    with pair_of(architecture, is_fused, tmp_path, transport, names="abc") as pair:
        pair.submit("first", FIRST, 2, GREEDY, goes_to="")
        pair.run()
        pair.submit("second", second, 0, SEEDED, pulls_from="c")
        pair.run()
        assert pair.tokens["second"] == expected["second"]
        assert pair.moved == ["second"]
        assert pair.ends["second"].cached_tokens == len(FIRST) + len(answer) - 1
        pair.check_pools()
