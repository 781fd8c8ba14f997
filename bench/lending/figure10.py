"""The highest rate of requests of a cluster that lends, and of ones that do not (figure 10a).

Run from the repository's root: ``python -m bench.lending.figure10``.  See README.md beside this
file.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from bench import result_file
from bench.lending.traces import ROUND_TRIP_SECONDS
from kvell.cli.replay.command import replay_limits
from kvell.cluster.steering.relief import Relief
from kvell.cost.amounts import shape_of
from kvell.cost.analytic import AnalyticModel, ModelCost
from kvell.cost.prices import ExecCosts, prices_of
from kvell.engine.requests.limits import Limits
from kvell.memory import Layout, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import describe
from kvell.simulator.clock.links import Link
from kvell.simulator.cluster.cluster import ClusterSpec, VirtualCluster
from kvell.simulator.cluster.figures import cluster_figures
from kvell.simulator.cluster.instance import Links
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_link, load_profile
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.lengths import INFINITE_LLM, MAX_OUTPUT_TOKENS, MEAN_OUTPUT_TOKENS
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB, SECTION_TOKENS

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Split = Literal["prompt", "half", "answer"]
System = Literal["alone", "migrating", "reactive", "Algorithm 1", "both", "one instance"]
ELEMENT_BYTES = 2
POOL_GIB = {"7b": 54, "13b": 48}
"""Of an A100-80 after weights and activations; of 13B, the trace's longest request just fits."""
MOVES: dict[System, Relief] = {
    "alone": "none",
    "migrating": "requests",
    "reactive": "reactive",
    "Algorithm 1": "loans",
    "both": "all",
    "one instance": "none",
}
SYSTEMS: tuple[System, ...] = tuple(MOVES)
ANSWER_PARTS: dict[Split, float] = {"half": 0.5, "answer": 0.9}
LONG_TOKENS = 2_000
"""Contexts from here on are long: the short ones have 60 tokens in the mean."""
PAGE_TOKENS = 2
USUAL_LOAD = (0.3, 2.0)
"""The load at a run's begin and end, in parts of what full instances would end."""
WINDOW_RESIDENCES, SAMPLES = 2.0, 32
"""Time over which latencies are averaged, in residences of a long request, and samples in it."""


@dataclass(frozen=True)
class Scale:
    """A coarser cluster that behaves alike.

    :param shorter: long contexts and their answers are shorter by this factor, and each of their
        tokens has as many times the bytes and the pairs: memory fills and batches cost as before,
        and all ends sooner by this factor.
    :param together: tokens of a simulated step, which takes as many times the seconds.
    """

    shorter: int
    together: int

    @property
    def tokens(self) -> int:
        """Tokens of a long request that one simulated token stands for."""
        return self.shorter * self.together


SCALES: dict[Split, Scale] = {"prompt": Scale(1, 4), "half": Scale(16, 8), "answer": Scale(16, 8)}


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    model: str
    trace: int
    split: Split
    instances: int
    overhead_seconds: float


@dataclass(frozen=True)
class Outcome:
    """A run of rising load.

    :param rate: requests a second when the latency passes its bound first; real seconds.
    :param bound: of the seconds per output token.
    :param passed: whether it did; else ``rate`` is that of the run's end.
    :param latency: over the last window, in latencies of lone requests.
    """

    cell: Cell
    system: System
    seed: int
    rate: float
    bound: float
    passed: bool
    latency: float
    preemptions: int
    lent: int
    moved: int
    refused: int


class Setting:
    """A cell's cluster, and what its traffic is.

    :ivar residence_seconds: of the mean long request in a full instance, virtual.
    :ivar most_rate: requests a second, virtual, that full instances would end.
    """

    def __init__(self, cell: Cell, scale: Scale, load: tuple[float, float]) -> None:
        self.cell, self.scale, self._load = cell, scale, load
        config = read_config(Path(__file__).with_name(f"llama2-{cell.model}.json"))
        self._description = describe(config, ELEMENT_BYTES * scale.tokens)
        cost = model_cost(config, self._description, ELEMENT_BYTES)
        self._cost = replace(cost, query_size=cost.query_size * scale.tokens)
        profile = load_profile("a100-80")
        self._profile = replace(
            profile,
            peak_flops=profile.peak_flops / scale.together,
            bandwidth_bytes=profile.bandwidth_bytes / scale.together,
            step_overhead_seconds=cell.overhead_seconds * scale.together,
        )
        self.lengths = INFINITE_LLM[cell.trace]
        self.pool_bytes = POOL_GIB[cell.model] * GIB
        link = load_link("nvlink-a100")
        self._link = Link(link.latency_seconds, link.bytes_per_second * scale.shorter)
        self._estimate()

    def prices(self) -> ExecCosts:
        """Return the prices that each instance reports."""
        rate = self._link.bandwidth_bytes
        return prices_of(
            AnalyticModel(self._profile, self._cost),
            shape_of(self._description.layers),
            fetch_bytes_per_second=rate,
            swap_bytes_per_second=rate,
            round_trip_seconds=ROUND_TRIP_SECONDS * self.scale.together,
        )

    def _estimate(self) -> None:
        """Estimate a full instance: its memory filled with mean long requests of half their age."""
        prompt, answer = self.sizes(np.array([self._long_tokens()]), 0)
        prompt_tokens, answer_tokens = int(prompt[0]), int(answer[0])
        costs = self.prices()
        token_bytes = sum(layer.token_bytes for layer in self._description.layers)
        pool_tokens = self.pool_bytes / token_bytes
        batch = max(1.0, pool_tokens / (prompt_tokens + answer_tokens / 2))
        step = costs.step_seconds(max(1, int(batch)), int(pool_tokens))
        prefill = costs.exec_seconds(prompt_tokens, 0)
        self.residence_seconds = answer_tokens * step + prefill * batch
        long_rate = self.cell.instances / (answer_tokens * step / batch + prefill)
        self.most_rate = long_rate / self.lengths.long_share
        self.lone_seconds = self._lone_seconds(costs)

    def _lone_seconds(self, costs: ExecCosts) -> float:
        """Return the real seconds per output token of requests that are alone."""
        whole = self.lengths.draw(np.random.default_rng(0), 2_000)
        sizes = np.stack(self.sizes(whole, 0))[:, self.counts(whole)]
        seconds = 0.0
        for prompt, answer in sizes.T.tolist():
            step = costs.step_seconds(1, prompt + answer // 2)
            seconds += costs.exec_seconds(prompt, 0) + answer * step
        return self.scale.shorter * seconds / (int(sizes[1].sum()) * self.scale.tokens)

    def counts(self, whole: Counts) -> Flags:
        """Return the requests whose latency counts: all, or the long ones if only these are
        shorter."""
        return (whole > LONG_TOKENS) | (self.scale.shorter == 1)

    def _long_tokens(self) -> int:
        """Return the mean length of a long request."""
        rng = np.random.default_rng(0)
        drawn = self.lengths.draw(rng, 20_000)
        return int(drawn[drawn > LONG_TOKENS].mean())

    def sizes(self, whole: Counts, seed: int) -> tuple[Counts, ...]:
        """Return simulated tokens of prompts and answers of contexts with these real lengths."""
        part = ANSWER_PARTS.get(self.cell.split)
        if part is None:
            draw = np.random.default_rng([seed, 1]).exponential(MEAN_OUTPUT_TOKENS, len(whole)) + 1
            answers = np.minimum(np.minimum(draw, MAX_OUTPUT_TOKENS), whole / 2)
        else:
            answers = whole * part
        per_token = np.where(whole > LONG_TOKENS, self.scale.tokens, self.scale.together)
        made = (np.ceil((whole - answers) / per_token), np.ceil(answers / per_token))
        prompts, outputs = (np.maximum(1, each).astype(np.int64) for each in made)
        return prompts, outputs

    def rows(self, seed: int, residences: float) -> tuple[list[TraceRow], Flags, float]:
        """Return requests at a rate that rises, which of them count, and the run's seconds."""
        seconds = residences * self.residence_seconds
        low, high = (part * self.most_rate for part in self._load)
        count = int(seconds * (low + high) / 2)
        rng = np.random.default_rng(seed)
        whole = self.lengths.draw(rng, count)
        passed = np.cumsum(rng.exponential(1.0, count))
        # The time at which a rate that rises from low to high has let in so many.
        slope = (high - low) / seconds
        rises = (np.sqrt(low * low + 2 * slope * passed) - low) / slope if slope else None
        at = passed / low if rises is None else rises
        prompts, outputs = self.sizes(whole, seed)
        rows = [
            TraceRow(float(a), int(p), int(o)) for a, p, o in zip(at, prompts, outputs, strict=True)
        ]
        return rows, self.counts(whole), seconds

    def rate_at(self, at_seconds: float, seconds: float) -> float:
        """Return the rate at a time of a run, in requests a real second."""
        low, high = (part * self.most_rate for part in self._load)
        return (low + (high - low) * at_seconds / seconds) / self.scale.shorter

    def spec(self, system: System) -> ClusterSpec:
        """Return a system's cluster; one instance has the memory and the devices of all."""
        count = self.cell.instances
        together = count if system == "one instance" else 1
        layout = plan_layout(
            self._description.layers, self.pool_bytes * together, page_tokens=PAGE_TOKENS
        )
        cost = _divided(self._cost, together)
        names = [f"mixed-{i}" for i in range(count // together)]
        lends = system in ("reactive", "Algorithm 1", "both")
        return ClusterSpec(
            {"mixed": count // together},
            layout,
            self._limits(layout, together),
            Machine(self._profile, cost),
            Links(self._link) if together == 1 else None,
            routing="most-free-memory",
            costs=self.prices(),
            hosts={name: name for name in names} if lends else None,
            asks=lends,
            moves=MOVES[system],
        )

    def _limits(self, layout: Layout, together: int) -> Limits:
        limits: Limits = replay_limits(layout, 1 << 20)
        section = max(PAGE_TOKENS, 2 * SECTION_TOKENS // self.scale.tokens)
        return replace(
            limits,
            max_num_seqs=256 * together,
            max_num_batched_tokens=max(512, 8_192 // self.scale.together) * together,
            reach_tokens=limits.max_model_len + section,
            section_tokens=section // PAGE_TOKENS * PAGE_TOKENS,
        )


def _divided(cost: ModelCost, count: int) -> ModelCost:
    """Return the cost of work that is spread evenly over ``count`` devices with all weights."""
    return replace(
        cost,
        active_weights=cost.active_weights // count,
        query_size=cost.query_size // count,
        layers=tuple(replace(each, unit_bytes=each.unit_bytes // count) for each in cost.layers),
    )


class RisingLoad:
    """A run that ends when the latency of its requests passes a bound.

    The mean number of requests, over the output tokens a second, is the mean time per output token
    of all of them, those included that have not ended (Little's law).
    """

    def __init__(self, setting: Setting, system: System, seed: int, residences: float) -> None:
        self._setting = setting
        self._rows, self._counted, self.seconds = setting.rows(seed, residences)
        self.cluster = VirtualCluster(setting.spec(system), self._rows)
        self._samples: list[tuple[float, int, int]] = []

    def pass_at(self, bound: float) -> float | None:
        """Return the virtual time at which the latency passes a bound; None if it never does."""
        self.cluster.start()
        every = WINDOW_RESIDENCES * self._setting.residence_seconds / SAMPLES
        while self.cluster.loop.now_seconds < self.seconds and self.cluster.go_on():
            now = self.cluster.loop.now_seconds
            if now < every * (len(self._samples) + 1):
                continue
            self._samples.append((now, *self._count()))
            if len(self._samples) > SAMPLES and self.latency() > bound:
                return now
        return None

    def _count(self) -> tuple[int, int]:
        """Return the number of requests that have come and not ended, and the tokens of all."""
        front, present, tokens = self.cluster.front, 0, 0
        for index in np.flatnonzero(self._counted).tolist():
            figures = front.requests[index]
            if figures.came_seconds is None:
                continue
            if figures.finish_seconds is None:
                present += 1
            else:
                tokens += self._rows[index].output_tokens
        for entry in front.queue.entries().in_flight:
            if self._counted[int(entry.request_id)]:
                tokens += entry.emitted_tokens
        return present, tokens

    def latency(self) -> float:
        """Return real seconds per output token over the last window."""
        window = self._samples[-SAMPLES - 1 :]
        tokens = (window[-1][2] - window[0][2]) * self._setting.scale.tokens
        present = sum(count for _, count, _ in window[1:]) / SAMPLES
        seconds = (window[-1][0] - window[0][0]) * self._setting.scale.shorter
        return present * seconds / tokens if tokens > 0 else math.inf


def outcome(
    setting: Setting, system: System, seed: int, bound: float, residences: float
) -> Outcome:
    """One run.

    :param bound: in times of what requests take that are alone.
    """
    run = RisingLoad(setting, system, seed, residences)
    at = run.pass_at(bound * setting.lone_seconds)
    figures = cluster_figures(run.cluster)
    return Outcome(
        *(setting.cell, system, seed),
        setting.rate_at(run.seconds if at is None else at, run.seconds),
        bound * setting.lone_seconds,
        at is not None,
        run.latency() / setting.lone_seconds,
        figures["roles"]["mixed"]["preemptions"],
        figures["sections"]["lent"],
        figures["requests_moved"],
        sum(end.reason == "error" for end in run.cluster.front.ends.values()),
    )


def show(cell: Cell, system: System, outcomes: Sequence[Outcome], alone: Sequence[Outcome]) -> str:
    """One line of the table: the median rate, and its ratio to the same seeds' rates alone."""
    rates = [each.rate for each in outcomes]
    ratios = [a.rate / b.rate for a, b in zip(outcomes, alone, strict=False)] or [math.nan]
    head = f"{cell.model:>5} {cell.trace:>5} {cell.split:<6} {cell.instances:>4} "
    head += f"{1e3 * cell.overhead_seconds:>4.0f} {system:<13}"
    rate = f"{median(rates):>7.3f} {median(each.latency for each in outcomes):>7.2f}"
    ratio = f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    counts = [sum(each.preemptions for each in outcomes), sum(each.lent for each in outcomes)]
    counts.append(sum(each.moved for each in outcomes))
    ended = "" if all(each.passed for each in outcomes) else " bound not reached"
    shown = " ".join(f"{count:>9}" for count in counts)
    return f"{head} {rate} {ratio:>18} {shown}{ended}"


def run_cell(cell: Cell, given: argparse.Namespace, scale: Scale) -> list[Outcome]:
    """All systems and seeds of a setting; prints as it goes."""
    setting = Setting(cell, scale, (given.load[0], given.load[-1]))
    made: dict[System, list[Outcome]] = {}
    for system in given.systems:
        made[system] = [
            outcome(setting, system, seed, given.bound, given.residences) for seed in given.seeds
        ]
        print(show(cell, system, made[system], made.get("alone", [])), flush=True)
    return [each for outcomes in made.values() for each in outcomes]


def cells_of(given: argparse.Namespace) -> list[Cell]:
    """Return the settings to run: the whole product, or one change at a time from the first."""
    axes = (given.models, given.traces, given.splits, given.instances, given.overheads_ms)
    chosen = list(product(*axes))
    if not given.full:
        first = chosen[0]
        changes = [sum(a != b for a, b in zip(each, first, strict=True)) for each in chosen]
        chosen = [each for each, count in zip(chosen, changes, strict=True) if count < 2]
    return [Cell(*each[:4], each[4] / 1e3) for each in chosen]


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["13b"], choices=[*POOL_GIB])
    parser.add_argument("--traces", type=int, nargs="+", default=[0], choices=[0, 1, 2])
    parser.add_argument("--splits", nargs="+", default=["answer"], choices=[*SCALES])
    parser.add_argument("--instances", type=int, nargs="+", default=[8])
    parser.add_argument("--overheads-ms", type=float, nargs="+", default=[2.0])
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--residences", type=float, default=20.0, help="of a long request, a run")
    parser.add_argument("--bound", type=float, default=3.0, help="in latencies of lone requests")
    parser.add_argument("--load", type=float, nargs="+", default=USUAL_LOAD, help="begin and end")
    parser.add_argument("--shorter", type=int, help="for all splits; see the README")
    parser.add_argument("--together", type=int, help="for all splits")
    parser.add_argument("--full", action="store_true", help="all combinations, not single changes")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    print(
        "model trace split     n   ms system         rate/s latency         over alone"
        " preempted      lent     moved"
    )
    file = given.json and result_file.RowFile(given.json, processor=result_file.VIRTUAL)
    made: list[Outcome] = []
    for cell in cells_of(given):
        usual = SCALES[cell.split]
        scale = Scale(given.shorter or usual.shorter, given.together or usual.together)
        outcomes = run_cell(cell, given, scale)
        for each in outcomes if file else ():
            file.add(asdict(each))
        made += outcomes
    return made


if __name__ == "__main__":
    main()
