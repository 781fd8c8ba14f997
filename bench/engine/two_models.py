"""Two models in one engine: where memory goes when load moves from one to the other and back.

The engine's own scheduler and memory core in virtual time, without weights.  In each phase many
clients ask one model and few the other; each sends its next request when it has its answer.
``kvell`` is one pool for both.  ``halves`` are two engines with half of the memory each that
take turns; ``manual`` and ``static`` cut one pool at start.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import result_file
from kvell.cli.plan.configs import load_config
from kvell.cli.terminal.session import Session
from kvell.cost.analytic import DeviceProfile, ModelCost
from kvell.engine.core.core import EngineCore
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits, ModelRules
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.memory import LayerSpec, Layout, Manager, create_core, longest_request, plan_layout
from kvell.models.config.description import describe
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.vocabulary import GIB, RequestId

RESULTS = result_file.path_of("two_models", result_file.VIRTUAL)
ELEMENT_BYTES = 2
PAIRS = (("gemma3-27b", "llama3-8b"), ("qwen3-next", "ministral-8b"), ("jamba-mini", "gpt-oss-20b"))
MEMORY_GIB = (16, 6, 2)
"""Memory of each pair, small enough that it, not the clients, bounds the batch."""
WAYS = ("kvell", "halves", "manual", "static")
BUSY_CLIENTS, QUIET_CLIENTS = 48, 2
PHASE_STEPS = 1_600
PROMPT_TOKENS = (512, 8_192)
OUTPUT_TOKENS = (32, 128)
BATCHED_TOKENS = 8_192


@dataclass(frozen=True)
class Model:
    """One model: what it stores and the cost of its steps."""

    name: str
    layers: tuple[LayerSpec, ...]
    cost: ModelCost
    max_model_len: int

    @classmethod
    def named(cls, name: str) -> "Model":
        """From its config in ``bench/configs``."""
        config = load_config(name, Session(cache_dir=Path("unused")))
        description = describe(config, ELEMENT_BYTES)
        layers = tuple(replace(layer, model=name) for layer in description.layers)
        cost = model_cost(config, description, ELEMENT_BYTES)
        return cls(name, layers, cost, description.max_model_len)


def engine_of(models: Sequence[Model], kv_bytes: int, manager: Manager) -> EngineCore:
    """An engine core that serves these models from one pool."""
    layers = [layer for model in models for layer in model.layers]
    layout = plan_layout(layers, kv_bytes, manager=manager)
    rules = [rules_of(model, layout) for model in models]
    return EngineCore(create_core(layout), rules[0].limits, frozenset(), models=rules)


def rules_of(model: Model, layout: Layout) -> ModelRules:
    """Rules of a model; its longest request is what the pool allows."""
    own, limits = layout.seen_by(model.name), Limits(BATCHED_TOKENS)
    longest = longest_request(own, model.max_model_len, limits.min_chunk_tokens)
    return ModelRules(model.name, replace(limits, max_model_len=longest), frozenset(), own)


@dataclass
class Phase:
    """Sums over the steps of a phase, by model; bytes are of pages in use."""

    steps: int = 0
    seconds: float = 0.0
    running: Counter[str] = field(default_factory=Counter)
    held_bytes: Counter[str] = field(default_factory=Counter)
    output_tokens: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0

    def figures(self, models: Sequence[Model], pool_bytes: int) -> dict[str, Any]:
        """Means over the steps, and rates per virtual second."""
        each = {
            model.name: {
                "batch": self.running[model.name] / self.steps,
                "share_of_pool": self.held_bytes[model.name] / self.steps / pool_bytes,
                "output_tokens_per_second": self.output_tokens[model.name] / self.seconds,
            }
            for model in models
        }
        return {"models": each, "seconds": self.seconds, "preemptions": self.preemptions}


class Clients:
    """Clients that keep a number of requests of each model under way; lengths are seeded."""

    def __init__(self, engines: Mapping[str, EngineCore]) -> None:
        self._engines = engines
        self._draw = {name: np.random.default_rng(len(name)) for name in engines}
        self._under_way = Counter[str](dict.fromkeys(engines, 0))
        self._count = 0

    def ask(self, wanted: Mapping[str, int]) -> None:
        """Submit requests until each model has the wanted number under way."""
        for name, count in wanted.items():
            while self._under_way[name] < count:
                self._submit(name)

    def ended(self, events: Sequence[object]) -> None:
        """Count finished requests."""
        for event in events:
            if isinstance(event, Finished):
                self._under_way[event.request_id.split("/")[0]] -= 1

    def _submit(self, name: str) -> None:
        draw, core = self._draw[name], self._engines[name]
        prompt = draw.integers(1 << 30, size=draw.integers(*PROMPT_TOKENS), dtype=np.int32)
        outputs = int(draw.integers(*OUTPUT_TOKENS))
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        self._count += 1
        request_id = RequestId(f"{name}/{self._count}")
        refused = core.submit(
            Submit(RequestSpec(request_id, prompt.tobytes(), sampling, model=name))
        )
        if refused:
            raise RuntimeError(f"{name} refuses a request: {refused}")
        self._under_way[name] += 1


def run(pair: Sequence[Model], way: str, kv_bytes: int, phase_steps: int) -> list[dict[str, Any]]:
    """Load the first model, the second, the first; figures are of each phase's second half."""
    if way == "halves":
        alone = {model.name: engine_of([model], kv_bytes // 2, "kvell") for model in pair}
        engines = alone
    else:
        both = engine_of(pair, kv_bytes, way)  # type: ignore[arg-type]
        engines = {model.name: both for model in pair}
    clients, profile = Clients(engines), load_profile(DEFAULT_HARDWARE)
    phases = []
    for busy in (0, 1, 0):
        wanted = {m.name: BUSY_CLIENTS if i == busy else QUIET_CLIENTS for i, m in enumerate(pair)}
        phase = Phase()
        for step in range(phase_steps):
            if step == phase_steps // 2:
                phase = Phase()  # what the last phase left waiting is done
            clients.ask(wanted)
            for core in {id(core): core for core in engines.values()}.values():
                _step(core, clients, phase, pair, profile)
            phase.steps += 1
        phases.append({"busy": pair[busy].name} | phase.figures(pair, kv_bytes))
    return phases


def _step(
    core: EngineCore,
    clients: Clients,
    phase: Phase,
    models: Sequence[Model],
    profile: DeviceProfile,
) -> None:
    plan = core.plan()
    phase.seconds += _seconds(plan, models, profile)
    phase.preemptions += len(plan.preempted)
    for work in plan.work:
        phase.running[work.spec.model] += 1
        phase.output_tokens[work.spec.model] += work.num_logits
    for model, held_bytes in _held_bytes(core):
        phase.held_bytes[model] += held_bytes
    clients.ended(core.commit(StepResult(plan.step, (7,) * plan.num_logits)))


def _seconds(plan: StepPlan, models: Sequence[Model], profile: DeviceProfile) -> float:
    """The models' passes of a step, one after the other."""
    parts = {model: [w for w in plan.work if w.spec.model == model.name] for model in models}
    return sum(profile.step_seconds(m.cost.of_step(part)) for m, part in parts.items() if part)


def _held_bytes(core: EngineCore) -> Iterator[tuple[str, int]]:
    totals = core.memory.totals()
    for group, pages in zip(core.memory.layout.groups, totals.used_pages, strict=True):
        yield group.model, pages * group.page_stride_bytes


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each pair, way and phase."""
    table = Table(title="Two models in one memory, load moves from one to the other")
    for name in ("pair", "way", "busy", "batch", "pool", "tokens/s", "of the other: batch", "pool"):
        table.add_column(name, justify="left" if name in ("pair", "way", "busy") else "right")
    for result in results:
        for way, phases in result["ways"].items():
            for phase in phases:
                own = phase["models"][phase["busy"]]
                (other,) = (m for n, m in phase["models"].items() if n != phase["busy"])
                table.add_row(
                    f"{' + '.join(result['pair'])}, {result['memory_gib']} GiB",
                    way,
                    phase["busy"],
                    f"{own['batch']:.1f}",
                    f"{own['share_of_pool']:.0%}",
                    f"{own['output_tokens_per_second']:.0f}",
                    f"{other['batch']:.1f}",
                    f"{other['share_of_pool']:.0%}",
                )
    return table


def over(result: dict[str, Any], way: str) -> float:
    """The busy model's batch in one pool over that of another way: the least of the phases."""
    ways = result["ways"]
    batches = [[p["models"][p["busy"]]["batch"] for p in ways[w]] for w in ("kvell", way)]
    pairs = zip(*batches, strict=True)
    return min(float(ours) / max(float(theirs), 1e-9) for ours, theirs in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase-steps", type=int, default=PHASE_STEPS)
    parser.add_argument("--pairs", type=int, default=len(PAIRS), help="so many of the pairs")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    for names, memory_gib in list(zip(PAIRS, MEMORY_GIB, strict=True))[: options.pairs]:
        pair = [Model.named(name) for name in names]
        ways = {way: run(pair, way, memory_gib * GIB, options.phase_steps) for way in WAYS}
        results.append({"pair": names, "memory_gib": memory_gib, "ways": ways})
    for result in results:
        result["batch_over"] = {way: over(result, way) for way in WAYS[1:]}
    console = Console(width=140)
    console.print(table_of(results))
    for result in results:
        ratios = ", ".join(f"{n:.2f} × {way}" for way, n in result["batch_over"].items())
        console.print(f"{' + '.join(result['pair'])}: the busy model's batch, at least {ratios}")
    result_file.write(options.json, {"results": results}, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
