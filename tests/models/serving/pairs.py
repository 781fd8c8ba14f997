"""Engines that hand requests over."""

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvell.cluster.steering.placements import Placement
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Migrate, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.memory import audit
from kvell.mempool.rendezvous import (
    FolderRendezvous,
    PageTransport,
    PdCaching,
    TransferMethod,
    make_folder,
)
from kvell.vocabulary import MIB, RequestId
from tests.models.cases import covering
from tests.models.harness import prompt_ids
from tests.models.serving.engines import MARKED, engine_of

PATIENCE_SECONDS = 60.0

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

SEEDED = SamplingParams(
    temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, presence_penalty=1.0
)

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
        handovers = (engine.core.pool for engine in self.engines)
        return any(one.holds_pages for one in handovers)

    def check_pools(self) -> None:
        for engine in self.engines:
            assert not any(engine.core.memory.snapshot().used)
            assert not engine.has_work()


def places_in(folder: Path, names: str, **settings: Any) -> list[FolderRendezvous]:
    make_folder(folder)
    return [FolderRendezvous(name, folder, **settings) for name in names]


@contextmanager
def closed_after(engines: Sequence[Engine]) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


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
    places = places_in(folder, names, pd_caching=pd_caching, transport=transport, method=method)
    engines = [engine_of(architecture, is_fused, 8 * MIB, pool_place=place) for place in places]
    with closed_after(engines):
        yield Pair(engines)


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


TRANSPORTS = ["memory", "tcp"]

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)

case_and_transport = covering(
    {"architecture,is_fused": MARKED, "transport": TRANSPORTS}, together=1
)
