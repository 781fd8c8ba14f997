"""Attention over pages that lie in another engine's pool: the same bits as over one's own."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.engine import Engine
from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.moving.handovers import Handovers
from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.engine.protocol.messages import Event, MoveKvCache, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.vocabulary import MIB, RequestId
from tests.models.harness import prompt_ids
from tests.models.serving.test_models_handed_over import PATIENCE_SECONDS, Pair
from tests.models.serving.test_models_pooling_served import engine_of, marked

STEP_BELOW_ONE = 2.0**-22
"""Probabilities are float32: those that are nearly one have no logarithms between."""
SECTION_TOKENS = 32
"""Tokens that are lent at once; real sections have 512, more than tiny models read."""
LONG = prompt_ids(130)
SHORT = {f"s{length}": prompt_ids(length, seed=9) for length in (5, 40, 70)}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=3)
MOST = 3
CASES = [
    ("LlamaForCausalLM", True),
    ("LlamaForCausalLM", False),
    ("Gemma3ForCausalLM", True),
    ("FalconH1ForCausalLM", True),
    ("FalconH1ForCausalLM", False),
    ("MiniCPM3ForCausalLM", False),
]
FAST = (CASES[0], CASES[3], CASES[5])
every_case = pytest.mark.parametrize(("architecture", "is_fused"), marked(CASES, FAST))


@dataclass
class Said:
    """What was said of a request: tokens, and how likely they were."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


def check(said: dict[str, Said], expected: dict[str, Said], is_fused: bool) -> None:
    """The same bits, but for what torch's modules make of requests that share a step: those are
    short, and lie at one instance.
    """
    assert {name: one.tokens for name, one in said.items()} == {
        name: one.tokens for name, one in expected.items()
    }
    exact = expected if is_fused else {"long": expected["long"]}
    assert {name: said[name] for name in exact} == exact
    for name, one in expected.items():
        told = [each.logprob for each in said[name].logprobs]
        due = [each.logprob for each in one.logprobs]
        assert told == pytest.approx(due, rel=1e-3, abs=STEP_BELOW_ONE)


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
        assert borrowed.audit() == []
        request = next((one for one in core.running if one.request_id == name), None)
        borrower = request and borrowed._borrowers.get(request.request_id)
        return borrower.away if borrower else 0

    def has_away(self, name: str, sections: int) -> Callable[[], bool]:
        """Whether so many sections of a request of the first engine are away."""
        return lambda: self.away(name) == sections

    def borrower(self, name: str) -> DistributedRequest | None:
        """What the first engine knows of a request's sections."""
        handovers = self.engines[0].core.pool
        assert isinstance(handovers, Handovers)
        return handovers.borrowed._borrowers.get(RequestId(name))

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
def lending(
    architecture: str, is_fused: bool, folder: Path, names: str = "abc", batched: int = 256
) -> Iterator[Lending]:
    make_folder(folder)
    engines = [
        engine_of(
            architecture,
            is_fused,
            8 * MIB,
            batched,
            pool_place=FolderRendezvous(name, folder),
        )
        for name in names
    ]
    with small_sections(engines):
        yield Lending(engines)


@contextmanager
def small_sections(engines: Sequence[Engine]) -> Iterator[None]:
    """Let engines lend few tokens at once, and close them in the end."""
    for engine in engines:
        assert isinstance(engine.core.pool, Handovers)
        engine.core.pool.borrowed.sections.section_tokens = SECTION_TOKENS
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


def alone(
    architecture: str, is_fused: bool, prompts: dict[str, list[int]], batched: int = 256
) -> dict[str, Said]:
    """What one engine says."""
    return said_by(engine_of(architecture, is_fused, batched=batched), prompts)


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


@every_case
def test_an_answer_is_the_same_bits_while_its_sections_go(
    architecture: str, is_fused: bool, tmp_path: Path
) -> None:
    """Sections go one after the other, to two creditors, who answer short requests meanwhile."""
    expected = alone(architecture, is_fused, {"long": LONG, **SHORT})
    with lending(architecture, is_fused, tmp_path) as several:
        several.submit("long", LONG, 0, PARAMS, goes_to="")
        several.run(several.answers("long"))
        for index, (name, prompt) in enumerate(SHORT.items()):
            several.submit(name, prompt, 1 + index % 2, PARAMS, goes_to="")
        seen = []
        for section in range(MOST):
            several.move("long", 1, "bc"[section % 2])
            several.hear(several.has_filled("long", section + 1))
            several.run(several.has_away("long", section + 1), 0.05)
            seen.append(several.away("long"))
        assert seen == [1, 2, 3] and "long" not in several.ends
        several.run()
        check(several.said, expected, is_fused)
        several.check_pools()


@every_case
def test_a_prompt_goes_while_it_is_computed(
    architecture: str, is_fused: bool, tmp_path: Path
) -> None:
    expected = alone(architecture, is_fused, {"long": LONG}, batched=8)
    with lending(architecture, is_fused, tmp_path, "ab", batched=8) as several:
        several.submit("long", LONG, 0, PARAMS, goes_to="")
        core = several.engines[0].core
        several.run(lambda: any(one.settled >= SECTION_TOKENS for one in core.running))
        several.move("long", MOST, "b")
        several.hear(several.has_filled("long", 1))
        most = 0

        def ended() -> bool:
            nonlocal most
            if not several.tokens["long"]:
                most = max(most, several.away("long"))
            return len(several.ends) == 1

        several.run(ended, 0.02)
        assert most, "nothing was away before the prompt was computed"
        several.run()
        check(several.said, expected, is_fused)
        several.check_pools()
