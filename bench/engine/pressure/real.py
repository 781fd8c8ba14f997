"""The scaled-down shapes for real: the engine in this process, both managers taking turns."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from statistics import mean

import numpy as np
import torch

from bench.engine.pressure.cases import WANTED, Case, ample_bytes, pressed_bytes
from bench.engine.pressure.figures import Figures
from bench.engine.pressure.small import VOCAB_SIZE, config_of
from bench.engine.pressure.virtual import is_decode
from kvell.attention.choice import choose_kernels
from kvell.engine.assembly import build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.running.runner import Runner
from kvell.engine.setup.options import EngineOptions
from kvell.memory import Manager
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import RequestId
from tests.models.random_model import random_paged_model

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""``cpu`` counts the CPU time of this process, on all its threads."""
BATCHED_TOKENS = 512
FIRST_ID = 10
WARM_TOKENS, WARM_SEED = 4, 1 << 20
"""Seed of a first round, which touches all memory and does not count."""


class PlanWatch:
    """A runner that remembers the last plan."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.plan = StepPlan(step=0)  # type: ignore[arg-type]

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan and remember it."""
        self.plan = plan
        return self._runner.run(plan)


@dataclass
class Served:
    """Times and tokens of a run, by one clock."""

    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    first_seconds: dict[str, float] = field(default_factory=dict)
    last_seconds: dict[str, float] = field(default_factory=dict)

    def told(self, events: list[Event], now: float) -> None:
        """Note when tokens came, in seconds from the start."""
        for event in events:
            if isinstance(event, Tokens):
                self.first_seconds.setdefault(event.request_id, now)
                self.last_seconds[event.request_id] = now

    def decoded(self, tokens: int, seconds: float) -> None:
        """Count a step that only decoded."""
        self.decode_seconds += seconds
        self.decode_tokens += tokens
        self.decode_steps += 1

    def figures(self, case: Case) -> Figures:
        """Figures of the whole run; latencies are means."""
        firsts, ends = self.first_seconds, self.last_seconds
        spans = [ends[name] - first for name, first in firsts.items()]
        return {
            "decode_tokens_per_second": self.decode_tokens / self.decode_seconds,
            "output_tokens_per_second": case.requests * case.output_tokens / max(ends.values()),
            "batch": self.decode_tokens / self.decode_steps,
            "ttft_seconds": mean(firsts.values()),
            "tpot_seconds": mean(spans) / (case.output_tokens - 1),
        }


class Contender:
    """One manager's engine for one case, with its own model."""

    def __init__(self, case: Case, manager: Manager, *, pressed: bool) -> None:
        kernels = choose_kernels(torch.device("cpu"))
        config = config_of(case.shape)
        model = random_paged_model(config, kernels, dtype=torch.bfloat16, scale=1.0)
        layers = model.description.layers
        kv_bytes = pressed_bytes(layers, case) if pressed else ample_bytes(layers, case)
        options = EngineOptions(
            kv_memory_bytes=kv_bytes,
            max_model_len=case.most_tokens,
            max_num_batched_tokens=BATCHED_TOKENS,
            max_num_seqs=WANTED,
            manager=manager,
        )
        self._engine: Engine = build_engine(model, case.shape, options)
        self._watch = PlanWatch(self._engine.runner)
        self._engine.runner = self._watch
        self._runs = self._left = 0

    def begin(self, case: Case, seed: int) -> None:
        """Submit all requests of a round."""
        self._submit(case, seed)
        self._case, self._left = case, case.requests
        self._seen = {name: Served() for name in CLOCKS}
        self._elapsed = dict.fromkeys(CLOCKS, 0.0)

    @property
    def is_done(self) -> bool:
        """Whether every request of the round is answered."""
        return self._left == 0

    def step(self) -> None:
        """Run one step; this engine's clock stands still while others step."""
        before = {name: clock() for name, clock in CLOCKS.items()}
        events = self._engine.step()
        took = {name: clock() - before[name] for name, clock in CLOCKS.items()}
        plan = self._watch.plan
        for name, served in self._seen.items():
            self._elapsed[name] += took[name]
            if is_decode(plan):
                served.decoded(plan.num_logits, took[name])
            served.told(events, self._elapsed[name])
        self._left -= sum(isinstance(event, Finished) for event in events)

    def figures(self) -> dict[str, Figures]:
        """Figures of a finished round, by clock."""
        return {name: served.figures(self._case) for name, served in self._seen.items()}

    def _submit(self, case: Case, seed: int) -> None:
        self._runs += 1
        draw = np.random.default_rng(seed)
        for index, tokens in enumerate(case.prompts(seed)):
            prompt = draw.integers(FIRST_ID, VOCAB_SIZE, tokens).astype("<i4").tobytes()
            count = case.output_tokens
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            name = RequestId(f"{self._runs}/{index}")
            events = self._engine.handle(Submit(RequestSpec(name, prompt, params)))
            if not is_accepted(events):
                raise RuntimeError(f"{case.shape}: a request is refused: {events}")


def alternated(case: Case, rounds: int, *, pressed: bool) -> dict[str, dict[str, list[Figures]]]:
    """Figures by clock and manager, round by round; both step in turn, so a disturbance hits both.

    A first round touches all memory and does not count.
    """
    if not pressed:
        case = replace(case, requests=WANTED)
    managers: tuple[Manager, ...] = ("kvell", "paged")
    contenders = {name: Contender(case, name, pressed=pressed) for name in managers}
    found: dict[str, dict[str, list[Figures]]]
    found = {clock: {name: [] for name in managers} for clock in CLOCKS}
    in_turn(contenders.values(), replace(case, output_tokens=WARM_TOKENS), WARM_SEED)
    for turn in range(rounds):
        in_turn(contenders.values(), case, turn)
        for name, contender in contenders.items():
            for clock, figures in contender.figures().items():
                found[clock][name].append(figures)
    return found


def in_turn(contenders: Collection[Contender], case: Case, seed: int) -> None:
    """Run one round of all engines, a step of each in turn."""
    for contender in contenders:
        contender.begin(case, seed)
    while not all(contender.is_done for contender in contenders):
        for contender in contenders:
            if not contender.is_done:
                contender.step()
