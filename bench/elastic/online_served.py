"""Requests that arrive one by one, for real: one pool and a CPU buffer against a static reserve.

See README.md beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.elastic.in_turn import SideClock, alternated, tokens_of
from bench.elastic.narrow_models import narrow_model
from bench.elastic.online_cases import (
    ATTAINMENT,
    BUFFER_GIB,
    CASES,
    CHUNKED_TOKENS,
    SLACK,
    mean_of,
    rising,
    write_part,
)
from bench.elastic.served import MAX_NUM_SEQS
from bench.elastic.step_parts import Shares, StepParts, shares_line
from kvell.device.host import CHUNK_BYTES
from kvell.engine.assembly import build_engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.options import EngineOptions
from kvell.load.arrivals import retimed
from kvell.load.outcome import Outcome
from kvell.load.report import Objectives, summary
from kvell.models.paged_model import PagedModel
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow, predecessors
from kvell.vocabulary import MIB, RequestId

SHAPE = "llama3-8b"
STATIC, CHUNKED, BOTH = "static", "static, chunks of 512", "both"
SIDES = (STATIC, CHUNKED, BOTH)
RESERVE_SHARE = 25 / CASES[0].memory_gib
"""Reserve as a part of the memory beside weights, as in ``bench.elastic.online_cases``."""
BUFFER_SHARE = BUFFER_GIB / CASES[0].memory_gib
"""CPU buffer, as a multiple of the same memory."""
AS_SOON = 1.05
"""First tokens up to this factor later count as equal: neighbours make steps differ."""


@dataclass(frozen=True)
class Setting:
    """A workload, and a server that is as short of memory as the paper's.

    :param shorter: divisor of the workload's prompt and answer lengths.
    :param context_tokens: context of the server, also the tokens of its largest step.
    :param loads: rates, in requests per service time of the mean request alone.
    :param draws: draws of lengths and arrivals, averaged: where first tokens take a few steps,
        chance arrivals change them by a fifth.
    """

    workload: str
    shorter: int
    context_tokens: int
    requests: int
    loads: tuple[float, ...]
    draws: int = 1


SETTINGS = (
    Setting("2k-2k", 8, 2_048, 24, rising(3.0, 4, 1.5)),
    Setting("32k-2k", 8, 8_192, 12, rising(1.0, 4, 1.5)),
    Setting("sharegpt-like", 2, 2_048, 32, rising(3.0, 4, 1.5), draws=3),
)


@dataclass(frozen=True)
class Arrival:
    """A request and when it comes."""

    seconds: float
    prompt: bytes
    output_tokens: int


def arrivals(setting: Setting, rate: float, vocab: int, seed: int = 0) -> list[Arrival]:
    """A Poisson process of unrelated prompts; a turn counts only the tokens that it adds."""
    rows = generate_trace(setting.workload, setting.requests, seed)
    lengths = [
        _added_tokens(rows, index, before) for index, before in enumerate(predecessors(rows))
    ]
    draw = np.random.default_rng(seed)
    found = []
    for row, added in zip(retimed(rows, rate=rate, seed=seed), lengths, strict=True):
        count = max(1, added // setting.shorter)
        ids = draw.integers(3, vocab, count).astype("<i4").tobytes()
        found.append(Arrival(row.arrival_s, ids, max(2, row.output_tokens // setting.shorter)))
    return found


def _added_tokens(rows: Sequence[TraceRow], index: int, before: int | None) -> int:
    row = rows[index]
    return row.prompt_tokens - (rows[before].num_tokens if before is not None else 0)


class Served:
    """One side at one rate: an engine, its own clock, and the outcome of each request."""

    def __init__(
        self, name: str, model: PagedModel, options: EngineOptions, asked: Sequence[Arrival]
    ) -> None:
        self.clock = SideClock()
        self._engine = build_engine(model, name, options, clock=self.clock)
        self._parts = StepParts(self._engine)
        self._asked = asked
        self._sent = 0
        self._first_seconds: dict[int, float] = {}
        self._last_seconds: dict[int, float] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request is still to arrive or unfinished."""
        return self._sent < len(self._asked) or self._engine.has_work()

    def step(self) -> None:
        """One step, with the requests that have arrived by now."""
        if not self._engine.has_work():
            self.clock.wait_until(self._asked[self._sent].seconds)
        self.clock.start()
        self._submit_those_who_came()
        for event in tokens_of(self._parts.step()):
            index = int(event.request_id)
            now_seconds = self.clock.now_seconds()
            self._first_seconds.setdefault(index, now_seconds)
            self._last_seconds[index] = now_seconds
        self.clock.stop()

    def _submit_those_who_came(self) -> None:
        now_seconds = self.clock.now_seconds()
        while self._sent < len(self._asked) and self._asked[self._sent].seconds <= now_seconds:
            one = self._asked[self._sent]
            sampling = SamplingParams(temperature=0, max_tokens=one.output_tokens, ignore_eos=True)
            self._engine.handle(Submit(RequestId(str(self._sent)), one.prompt, sampling))
            self._sent += 1

    def outcomes(self) -> list[Outcome]:
        """What each client saw."""
        return [
            Outcome(
                index,
                one.seconds,
                one.seconds,
                self._last_seconds[index],
                (self._first_seconds[index], self._last_seconds[index]),
                len(one.prompt) // 4,
                one.output_tokens,
            )
            for index, one in enumerate(self._asked)
        ]

    def counters(self) -> dict[str, Any]:
        """Counters of its memory."""
        stats = self._engine.core.stats()
        parts = asdict(self._parts.shares())
        return {"preemptions": stats.preemptions, "cpu_buffer": stats.buffer, "parts": parts}


def options_of(
    model: PagedModel, setting: Setting, asked: Objectives | None
) -> dict[str, EngineOptions]:
    """Options of each side; all have the same memory beside weights.

    :param asked: objectives of the side with a buffer.
    """
    reserve_bytes = model.activations.need_bytes(setting.context_tokens, MAX_NUM_SEQS)
    bound_bytes = int(reserve_bytes / RESERVE_SHARE) // CHUNK_BYTES * CHUNK_BYTES
    chunk_bytes = model.activations.need_bytes(CHUNKED_TOKENS, MAX_NUM_SEQS)
    common = EngineOptions(
        max_model_len=setting.context_tokens,
        max_num_batched_tokens=setting.context_tokens,
        max_num_seqs=MAX_NUM_SEQS,
    )
    return {
        STATIC: replace(common, kv_memory_bytes=bound_bytes - reserve_bytes),
        CHUNKED: replace(
            common,
            kv_memory_bytes=bound_bytes - chunk_bytes,
            max_num_batched_tokens=CHUNKED_TOKENS,
        ),
        BOTH: replace(
            common,
            memory_bytes=model.weight_bytes + bound_bytes,
            cpu_buffer_bytes=int(BUFFER_SHARE * bound_bytes),
            slo_ttft_seconds=None if asked is None else asked.ttft_seconds,
            slo_tpot_seconds=None if asked is None else asked.tpot_seconds,
        ),
    }


def objectives(model: PagedModel, setting: Setting, runs: int = 3) -> tuple[Objectives, float]:
    """Objectives, :data:`SLACK` times the mean request's latencies alone, and its seconds."""
    asked = arrivals(setting, 1.0, model.description.vocab_size)
    prompt = int(np.mean([len(one.prompt) // 4 for one in asked]))
    output = int(np.mean([one.output_tokens for one in asked]))
    ids = np.random.default_rng(1).integers(3, model.description.vocab_size, (runs + 1, prompt))
    alone = [Arrival(1e4 * at, row.astype("<i4").tobytes(), output) for at, row in enumerate(ids)]
    side = Served(STATIC, model, options_of(model, setting, None)[STATIC], alone)
    alternated([side])
    seen = side.outcomes()[1:]
    tpots = [one.tpot_seconds for one in seen if one.tpot_seconds is not None]
    first = min(one.ttft_seconds for one in seen)
    told = Objectives(SLACK * first, SLACK * min(tpots))
    return told, min(one.e2e_seconds for one in seen)


Seen = dict[str, Any]


def run(models: dict[str, PagedModel], setting: Setting, rate: float, told: Objectives) -> Seen:
    """All sides at one rate: figures by side, each the mean of the setting's draws."""
    drawn = [run_draw(models, setting, rate, told, n) for n in range(setting.draws)]
    found: Seen = mean_of(drawn)
    return found


def run_draw(
    models: dict[str, PagedModel], setting: Setting, rate: float, told: Objectives, draw: int
) -> Seen:
    """All sides, a step of each in turn."""
    asked = arrivals(setting, rate, models[STATIC].description.vocab_size, draw)
    chosen = options_of(models[STATIC], setting, told)
    sides = {name: Served(name, models[name], chosen[name], asked) for name in SIDES}
    alternated(list(sides.values()))
    kept = ("ttft_seconds", "tpot_seconds", "slo_attainment", "output_tokens_per_second")
    found: Seen = {}
    for name, side in sides.items():
        figures = summary(side.outcomes(), told)
        found[name] = {key: figures[key] for key in kept} | side.counters()
    return found


def goodput(runs: dict[float, Seen], side: str) -> float:
    """The highest rate that the side keeps up with, and with all below it; 0 if none."""
    best = 0.0
    for rate in sorted(runs):
        if runs[rate][side]["slo_attainment"] < ATTAINMENT:
            break
        best = rate
    return best


def verdicts(runs: dict[float, Seen]) -> list[str]:
    """Goodput beside both static sides; first tokens at the lowest rate and at each goodput."""
    best = {side: goodput(runs, side) for side in SIDES}
    told = []
    for side in (STATIC, CHUNKED):
        holds = "holds" if best[BOTH] >= best[side] else "FAILS"
        told.append(f"{holds}: goodput {best[BOTH]:.2f}/s, {side} {best[side]:.2f}/s")
    for rate in sorted({min(runs), *best.values()} - {0.0}):
        first = {side: runs[rate][side]["ttft_seconds"]["mean"] for side in SIDES}
        soonest = min(first[STATIC], first[CHUNKED])
        holds = "holds" if first[BOTH] <= AS_SOON * soonest else "FAILS"
        told.append(
            f"{holds}: at {rate:.2f}/s TTFT {first[BOTH]:.3f} s, "
            f"beside {first[STATIC]:.3f} and {first[CHUNKED]:.3f}"
        )
    return told


def of_setting(models: dict[str, PagedModel], setting: Setting) -> dict[str, Any]:
    """Run all rates of a workload; print results as they come."""
    told, alone_seconds = objectives(models[STATIC], setting)
    memory = {
        side: one.kv_memory_bytes for side, one in options_of(models[STATIC], setting, told).items()
    }
    print(
        f"{SHAPE} / 8, {setting.workload} / {setting.shorter}, {setting.requests} requests; "
        f"objectives: TTFT {told.ttft_seconds:.2f} s, TPOT {told.tpot_seconds:.3f} s; "
        f"KV of static {(memory[STATIC] or 0) / MIB:.0f} MiB",
        flush=True,
    )
    runs: dict[float, Seen] = {}
    for rate in (load / alone_seconds for load in setting.loads):
        runs[rate] = run(models, setting, rate, told)
        for side in SIDES:
            print(line(side, rate, runs[rate][side]), flush=True)
    said = verdicts(runs)
    print("\n".join(f"  {one}" for one in said), flush=True)
    return {
        "setting": asdict(setting),
        "objectives": asdict(told),
        "alone_seconds": alone_seconds,
        "runs": {f"{rate:.3f}": seen for rate, seen in runs.items()},
        "verdicts": said,
    }


def line(side: str, rate: float, seen: Seen) -> str:
    """One run of a side as a line of text."""
    ttft, tpot = seen["ttft_seconds"], seen["tpot_seconds"]
    return (
        f"  {side:22} at {rate:5.2f}/s TTFT {ttft['mean']:7.3f} s (p90 {ttft['p90']:7.3f}), "
        f"TPOT {1e3 * tpot['mean']:6.1f} ms, {seen['output_tokens_per_second']:6.1f} tokens/s, "
        f"{seen['preemptions']:.0f} preemptions, {100 * seen['slo_attainment']:.0f} % in time; "
        f"{shares_line(Shares(**seen['parts']))}"
    )


def write_workload(name: str, found: dict[str, Any], path: Path) -> None:
    """Write one workload into the file of all; keep the others in it."""
    write_part("workloads", name, found, path)


def main() -> None:
    """Print every side at every rate, and verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=[one.workload for one in SETTINGS])
    parser.add_argument("--requests", type=int, help="of every workload, if not its own number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    models = {side: narrow_model(SHAPE) for side in SIDES}
    for named in SETTINGS:
        if options.workloads and named.workload not in options.workloads:
            continue
        found = of_setting(models, replace(named, requests=options.requests or named.requests))
        if options.json:
            write_workload(named.workload, found, options.json)


if __name__ == "__main__":
    main()
