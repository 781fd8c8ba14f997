"""What the engine decided over a model is decided again in virtual time, from its journal alone."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvell.attention.choice import choose_kernels
from kvell.clock import VirtualClock
from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Entry, Journal, apply
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Cancel, Event, Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.statistics import Stats
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.requests.request import Request
from kvell.engine.running.runner import Runner
from kvell.llm import LLM
from kvell.memory import LayerSpec, MemoryCore, create_core, facts_of, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.models.paged_model import PagedModel
from kvell.models.sources.packaged import MODEL_NAME
from kvell.simulator.cluster.meter import MeteredCore
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay.runner import Machine, StepTimer
from kvell.simulator.report.metrics import MemoryMeter, RunningRequest, StepMeans
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import KIB, MIB, RequestId
from tests.models.harness import tiny_module


@dataclass(frozen=True)
class JournaledStep:
    """A plan, and the counters after it was made, by group in the order of the layout.

    :param end_seconds: virtual time at which the step ends.
    """

    plan: StepPlan
    end_seconds: float
    evicted_pages: tuple[int, ...]
    hit_tokens: tuple[int, ...]


@dataclass(frozen=True)
class JournalReport:
    """The decisions of an engine.

    :param finished: the end of each request, with its hit tokens.
    :param stats: gauges and counters at the end.
    :param means: memory over the steps.
    """

    steps: tuple[JournaledStep, ...]
    finished: dict[RequestId, Finished]
    stats: Stats
    means: StepMeans

    @property
    def plans(self) -> list[StepPlan]:
        return [step.plan for step in self.steps]


def replay_journal(
    entries: Iterable[Entry],
    core: MemoryCore,
    layers: Sequence[LayerSpec],
    limits: Limits,
    machine: StepTimer,
    eos_token_ids: frozenset[int] = frozenset(),
) -> JournalReport:
    """Feed a journal to a new engine core over ``core``.

    :param core: an empty memory core of the engine's layout.
    :param layers: the model's layers, which determine the tokens that are still needed.
    :param limits: the engine's.
    :param machine: gives each step its duration.
    :param eos_token_ids: the engine's.
    :raises ValueError: if the journal is of a different engine: a result matches no plan.
    """
    again = _Again(MeteredCore(core), layers, limits, machine, eos_token_ids)
    for entry in entries:
        again.take(entry)
    stats = again.engine.stats()
    return JournalReport(tuple(again.steps), again.finished, stats, again.means)


@dataclass
class _Again:
    """An engine that receives the inputs of another one."""

    memory: MeteredCore
    layers: Sequence[LayerSpec]
    limits: Limits
    machine: StepTimer
    eos_token_ids: frozenset[int]
    steps: list[JournaledStep] = field(default_factory=list)
    finished: dict[RequestId, Finished] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = EngineCore(self.memory, self.limits, self.eos_token_ids)
        self.means = StepMeans(self.memory.layout)
        self._meter = MemoryMeter(self.memory.layout, self.layers)
        self.memory.on_advanced = self._look

    def take(self, entry: Entry) -> None:
        outcome = apply(entry, self.engine)
        if isinstance(outcome, StepPlan):
            self._note_plan(outcome)
        else:
            self._note(outcome)

    def _note_plan(self, plan: StepPlan) -> None:
        self.clock.advance(self.machine.step_seconds(plan))
        totals = self.memory.totals()
        self.steps.append(
            JournaledStep(
                plan, self.clock.now_seconds(), totals.evicted_pages, totals.group_hit_tokens
            )
        )

    def _look(self) -> None:
        waits = self.engine.counters.num_waiting > 0
        running = [self._progress(request) for request in self.engine.running]
        sample = self._meter.sample(running, self.memory.totals(), leaves_waiting=waits)
        self.means.samples.append(sample)

    def _progress(self, request: Request) -> RunningRequest:
        length, hit = len(request.prompt), self.engine.memory.hit_tokens(request.handle)
        facts = facts_of(length, length, request.images)
        return RunningRequest(request.settled, hit, facts, request.model)

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.finished[event.request_id] = event


ELEMENT_BYTES = 4


@dataclass
class Witness:
    """Stands between an engine and its runner: the plans as they were carried out."""

    runner: Runner
    engine: Engine
    plans: list[StepPlan] = field(default_factory=list)
    evicted: list[tuple[int, ...]] = field(default_factory=list)
    hit: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, plan: StepPlan) -> StepResult:
        totals = self.engine.core.memory.totals()
        self.plans.append(plan)
        self.evicted.append(totals.evicted_pages)
        self.hit.append(totals.group_hit_tokens)
        return self.runner.run(plan)


@dataclass(frozen=True)
class Served:
    """A run over a model: all that may be known of it outside the engine."""

    engine: Engine
    journal: Journal
    witness: Witness
    hits: dict[str, int]
    config: Any
    layers: Sequence[LayerSpec]
    eos_token_ids: frozenset[int]

    def again(self) -> JournalReport:
        core = self.engine.core
        description = describe(self.config, ELEMENT_BYTES)
        machine = Machine(
            load_profile(DEFAULT_HARDWARE), model_cost(self.config, description, ELEMENT_BYTES)
        )
        memory = create_core(core.memory.layout)
        return replay_journal(
            self.journal.entries, memory, self.layers, core.limits, machine, self.eos_token_ids
        )


def watched(engine: Engine) -> Witness:
    witness = Witness(engine.runner, engine)
    engine.runner = witness
    return witness


def prompts_of_families(
    count: int, families: int, head_tokens: int, vocabulary: int
) -> list[list[int]]:
    """Prompts in random order that begin with one of a few heads and end on their own."""
    draw = np.random.default_rng(11)
    heads = [draw.integers(3, vocabulary, head_tokens).tolist() for _ in range(families)]
    prompts = []
    for _ in range(count):
        head = heads[int(draw.integers(families))]
        kept = int(draw.integers(head_tokens // 2, head_tokens + 1))
        tail = draw.integers(3, vocabulary, int(draw.integers(1, head_tokens // 2)))
        prompts.append(head[:kept] + tail.tolist())
    return prompts


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Served:
    """Prompts of 33 to 95 tokens in a pool of a few requests; one more is cancelled."""
    journal = Journal()
    llm = LLM(
        MODEL_NAME,
        dtype="float32",
        cache_dir=smollm2_path.parent,
        kv_memory_bytes=9 * MIB,
        max_num_batched_tokens=64,
        journal=journal,
    )
    witness = watched(llm.engine)
    prompts = prompts_of_families(24, 5, 64, 40_000)
    lengths = [20 if i % 4 == 0 else 3 for i in range(len(prompts))]
    params = [SamplingParams(temperature=0.7, max_tokens=n, seed=n) for n in lengths]
    outputs = llm.generate(prompts, params)
    ids = np.asarray(prompts[0], "<i4").tobytes()
    llm.engine.handle(Submit(RequestSpec(RequestId("cut"), ids, params[-1])))
    llm.engine.step()
    llm.engine.handle(Cancel(RequestId("cut")))
    config = read_config(smollm2_path)
    return Served(
        llm.engine,
        journal,
        witness,
        {f"r{output.index}": output.cached_tokens for output in outputs},
        config,
        describe(config, ELEMENT_BYTES).layers,
        llm.tokenizer.eos_token_ids,
    )


@pytest.fixture(scope="module")
def gemma3() -> Served:
    """Random weights, five layers of window 9 to a full one; prompts far longer than that."""
    module = copy.deepcopy(tiny_module("Gemma3ForCausalLM"))
    description = describe(module.config, ELEMENT_BYTES)
    large_page_bytes = plan_layout(description.layers, 4096 * KIB).large_page_bytes
    model = PagedModel(module, description, choose_kernels(torch.device("cpu")))
    options = EngineOptions(
        kv_memory_bytes=18 * large_page_bytes, max_model_len=128, max_num_batched_tokens=64
    )
    journal = Journal()
    engine = build_engine(model, "gemma3", options, journal=journal)
    witness = watched(engine)
    hits: dict[str, int] = {}
    prompts = prompts_of_families(36, 4, 64, 500)
    for start in range(0, len(prompts), 12):
        for index, prompt in enumerate(prompts[start : start + 12], start):
            params = SamplingParams(temperature=0, max_tokens=20 + index % 17, ignore_eos=True)
            ids = np.asarray(prompt, "<i4").tobytes()
            assert is_accepted(
                engine.handle(Submit(RequestSpec(RequestId(f"q{index}"), ids, params)))
            )
        engine.step()
        engine.handle(Cancel(RequestId(f"q{start + 1}")))
        while engine.has_work():
            ended = [event for event in engine.step() if isinstance(event, Finished)]
            hits |= {event.request_id: event.cached_tokens for event in ended}
    return Served(engine, journal, witness, hits, module.config, description.layers, frozenset())


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.long), "gemma3"])
def served(request: pytest.FixtureRequest) -> Served:
    run: Served = request.getfixturevalue(request.param)
    return run


@pytest.fixture
def report(served: Served) -> JournalReport:
    return served.again()


def test_the_pool_was_too_small_for_comfort(served: Served) -> None:
    """Else there was little to get wrong."""
    stats = served.engine.core.stats()
    assert stats.preemptions > 0
    assert stats.rungs["evict_large"] + stats.rungs["evict_page"] > 0
    assert all(group.evicted_pages > 0 for group in stats.groups)
    assert len([hit for hit in served.hits.values() if hit]) > len(served.hits) // 4
    assert stats.finished["cancelled"] > 0


def test_every_plan_is_the_same(served: Served, report: JournalReport) -> None:
    assert len(report.plans) == len(served.witness.plans) > 50
    assert report.plans == served.witness.plans


def test_every_request_hits_as_much(served: Served, report: JournalReport) -> None:
    hits = {name: report.finished[RequestId(name)].cached_tokens for name in served.hits}
    assert hits == served.hits
    assert [step.hit_tokens for step in report.steps] == served.witness.hit


def test_the_same_pages_are_evicted_in_every_step(served: Served, report: JournalReport) -> None:
    assert [step.evicted_pages for step in report.steps] == served.witness.evicted


def test_all_counters_end_alike(served: Served, report: JournalReport) -> None:
    stats = replace(served.engine.core.stats(), misses={})  # nobody asks a replay why they missed
    assert report.stats == stats
    assert report.stats.rungs == stats.rungs
    assert served.again().stats.groups == stats.groups


def test_the_pool_is_left_as_the_engine_left_it(served: Served) -> None:
    core = create_core(served.engine.core.memory.layout)
    machine = Machine(load_profile(DEFAULT_HARDWARE), model_cost_of(served))
    limits = served.engine.core.limits
    replay_journal(
        served.journal.entries, core, served.layers, limits, machine, served.eos_token_ids
    )
    assert core.snapshot() == served.engine.core.memory.snapshot()


def model_cost_of(served: Served) -> Any:
    return model_cost(served.config, describe(served.config, ELEMENT_BYTES), ELEMENT_BYTES)


def test_virtual_time_and_memory_are_told(report: JournalReport) -> None:
    ends = [step.end_seconds for step in report.steps]
    assert all(before < after for before, after in zip([0.0, *ends], ends, strict=False))
    means = report.means.means()
    assert len(report.means.samples) == len(ends)
    assert 0 < means.waste < 0.5
    assert means.batch > 1


def test_a_result_of_no_plan_is_refused(served: Served) -> None:
    without_plans = [entry for entry in served.journal.entries if isinstance(entry, StepResult)]
    alone = Served(
        served.engine,
        Journal(list(without_plans)),
        served.witness,
        {},
        served.config,
        served.layers,
        served.eos_token_ids,
    )
    with pytest.raises(ValueError, match="was not asked for"):
        alone.again()
