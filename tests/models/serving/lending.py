import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvell.engine.engine import Engine
from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.moving.handovers import Handovers
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Event, MoveKvCache, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.vocabulary import RequestId
from tests.engine.lending.borrow_audit import audit_borrowed
from tests.models.serving.pairs import PATIENCE_SECONDS, Pair

SECTION_TOKENS = 32


"""Tokens that are lent at once; real sections have 512, more than tiny models read."""

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)


@dataclass
class Said:
    """What was said of a request: tokens, and how likely they were."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


class Lending(Pair):
    """Several engines that lend each other memory, and what they said with logprobs."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        super().__init__(engines)
        self.said: dict[str, Said] = {}

    def take(self, events: Sequence[Event]) -> None:
        super().take(events)
        for event in events:
            if isinstance(event, Tokens):
                said = self.said.setdefault(event.request_id, Said([], []))
                said.tokens.extend(event.token_ids)
                said.logprobs.extend(event.logprobs or ())

    def move(self, name: str, num_blocks: int, dst: str, at: int = 0) -> None:
        self.take(self.engines[at].handle(MoveKvCache(RequestId(name), 0, num_blocks, dst)))

    def away(self, name: str, at: int = 0) -> int:
        core = self.engines[at].core
        assert isinstance(core.pool, Handovers)
        borrowed = core.pool.borrowed
        assert audit_borrowed(borrowed) == []
        request = next((one for one in core.running if one.request_id == name), None)
        borrower = request and borrowed.borrowers.get(request.request_id)
        return borrower.away if borrower else 0

    def has_away(self, name: str, sections: int) -> Callable[[], bool]:
        """Whether so many sections of a request of the first engine are away."""
        return lambda: self.away(name) == sections

    def borrower(self, name: str) -> DistributedRequest | None:
        """What the first engine knows of a request's sections."""
        handovers = self.engines[0].core.pool
        assert isinstance(handovers, Handovers)
        return handovers.borrowed.borrowers.get(RequestId(name))

    def has_filled(self, name: str, sections: int) -> Callable[[], bool]:
        """Whether so many sections of a request of the first engine can be read elsewhere."""
        return lambda: (one := self.borrower(name)) is not None and one.filled >= sections

    def hear(self, until: Callable[[], bool]) -> None:
        """Take in what other engines say and copies that have ended; nobody takes a step."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until():
            assert time.monotonic() < deadline
            self.listen(0.1)
            for engine in self.engines:
                self.take(engine.woken())

    def answers(self, name: str) -> Callable[[], bool]:
        """Whether a request has its first token."""
        return lambda: bool(self.tokens[name])


@contextmanager
def small_sections(engines: Sequence[Engine]) -> Iterator[None]:
    """Let engines lend few tokens at once, and close them in the end."""
    for engine in engines:
        assert isinstance(engine.core.pool, Handovers)
        engine.core.pool.borrowed.section_tokens = SECTION_TOKENS
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


def said_by(
    engine: Engine,
    prompts: dict[str, list[int]],
    params: SamplingParams = PARAMS,
    model: str = "",
) -> dict[str, Said]:
    """What an engine says that computes each request by itself."""
    found: dict[str, Said] = {}
    for name, prompt in prompts.items():
        engine.handle(
            Submit(
                RequestSpec(
                    RequestId(name), np.asarray(prompt, "<i4").tobytes(), params, model=model
                )
            )
        )
        while engine.has_work():
            for event in engine.step():
                if isinstance(event, Tokens):
                    said = found.setdefault(name, Said([], []))
                    said.tokens.extend(event.token_ids)
                    said.logprobs.extend(event.logprobs or ())
    return found
