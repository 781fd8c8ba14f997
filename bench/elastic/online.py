"""Requests that come one by one, in virtual time: how many a second, at what latency, by side.

See README.md beside this file.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.elastic.offline import CHUNK_BYTES, MIN_CHUNK_TOKENS, counting_device
from bench.replay.shapes import ELEMENT_BYTES, Shape, layout_of, read_shape
from kvell.cli.replay_latency import latencies, outcomes
from kvell.clock import MonotonicClock
from kvell.cost.analytic import AnalyticModel
from kvell.cost.swap_rule import ByCost
from kvell.cost.work import Chunk
from kvell.elastic.arena import ActivationModel
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.page_buffer import PageBuffer
from kvell.elastic.tiling import Tiling
from kvell.engine.lateness import LatenessWatch
from kvell.engine.limits import Limits
from kvell.engine.parking import Parking
from kvell.engine.scheduler import INITIAL_EXPECTED_OUTPUT
from kvell.engine.step_memory import SharedMemory
from kvell.engine.swapping import Swapping
from kvell.load.arrivals import retimed
from kvell.load.report import Objectives
from kvell.memory import MemoryCore, create_core
from kvell.simulator.activation_bytes import activation_model
from kvell.simulator.generators import generate_trace
from kvell.simulator.host_link import WithHostLink
from kvell.simulator.model_cost import model_cost
from kvell.simulator.profiles import load_link, load_profile
from kvell.simulator.replay import Replay
from kvell.simulator.rows import TraceRow
from kvell.simulator.runner import Machine, StepTimer
from kvell.vocabulary import GIB

CHUNKED_TOKENS = 512
SLACK = 25
"""Objectives are so many times what a request sees alone."""
EARLY = 0.5
"""Algorithm 2 is told of so much of the objectives, to act before they are missed."""
ATTAINMENT = 0.9
"""Goodput is the highest rate at which so many requests meet both."""


@dataclass(frozen=True)
class Case:
    """A shape, memory for KV and activations together, a workload, and the rates to look at.

    :param rates: requests per second, rising.
    """

    shape: str
    memory_gib: float
    workload: str
    requests: int
    rates: tuple[float, ...]


def rising(first: float, count: int = 12, factor: float = 1.25) -> tuple[float, ...]:
    """Rates, each 25 % above the one before."""
    return tuple(first * factor**n for n in range(count))


CASES = (
    Case("llama3-8b", 57, "32k-2k", 60, rising(0.05)),
    Case("llama3-8b", 57, "2k-2k", 300, rising(0.8)),
    Case("llama3-8b", 20, "sharegpt-like", 600, rising(4.0)),
)


@dataclass(frozen=True)
class Side:
    """How memory is divided.

    :param shares: KV cache and activations share one pool; else activations have a reserve.
    :param buffer_gib: of host memory: preempted requests go there, and prompts ahead of decodes.
    :param fixed: the buffer's logical size is the physical one, whoever is late.
    :param batched_tokens: of a step at most; None for the longest prompt.
    """

    name: str
    shares: bool = False
    buffer_gib: float = 0.0
    batched_tokens: int | None = None
    fixed: bool = False
    ahead: bool = True


SIDES = (
    Side("static"),
    Side("static, chunks of 512", batched_tokens=CHUNKED_TOKENS),
    Side("buffer only", buffer_gib=64),
    Side("intra only", shares=True),
    Side("both", shares=True, buffer_gib=64),
    Side("both, fixed size", shares=True, buffer_gib=64, fixed=True),
    Side("both, chunks of 2,048", shares=True, buffer_gib=64, batched_tokens=2_048),
)
"""The third and the fourth are the ablation; with a fixed size Algorithm 2 has no say."""


@dataclass(frozen=True)
class Bench:
    """What all runs of a case have in common."""

    case: Case
    shape: Shape
    need: ActivationModel
    machine: "AnalyticMachine"
    bytes_per_second: float

    def rows(self, rate: float) -> list[TraceRow]:
        """The workload as a Poisson process."""
        rows = generate_trace(self.case.workload, self.case.requests, 0)
        return retimed(rows, rate=rate)

    def limits(self, side: Side) -> Limits:
        """Requests as long as the workload's longest."""
        rows = self.rows(1.0)
        longest = max(row.prompt_tokens for row in rows)
        both = max(row.prompt_tokens + row.output_tokens for row in rows)
        return Limits(
            max_num_batched_tokens=side.batched_tokens or longest,
            max_model_len=both + 1,
            min_chunk_tokens=min(MIN_CHUNK_TOKENS, side.batched_tokens or longest),
        )

    def objectives(self) -> Objectives:
        """25 times what the mean request sees alone."""
        rows = self.rows(1.0)
        prompt = sum(row.prompt_tokens for row in rows) // len(rows)
        alone = self.machine.step_seconds_of([Chunk(0, prompt)])
        token = self.machine.step_seconds_of([Chunk(prompt, 1)])
        return Objectives(SLACK * alone, SLACK * token)


class AnalyticMachine(Machine):
    """A machine that also tells how long any work would take."""

    def step_seconds_of(self, work: Sequence[Chunk]) -> float:
        """Seconds of a step."""
        return self.profile.step_seconds(self.cost.of_step(work))


def run(bench: Bench, side: Side, rate: float) -> dict[str, Any]:
    """One side at one rate: latencies, goodput, counters."""
    limits = bench.limits(side)
    num_chunks = int(bench.case.memory_gib * GIB) // CHUNK_BYTES
    pool_bytes = num_chunks * CHUNK_BYTES
    if not side.shares:
        pool_bytes -= bench.need.need_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    layout = layout_of(bench.shape, pool_bytes)
    core = create_core(layout)
    share: Callable[[MemoryCore], SharedMemory] | None = None
    if side.shares:
        tiled = Tiling(num_chunks, CHUNK_BYTES, layout.large_page_bytes, layout.num_large_pages)
        elastic = ElasticMemory(counting_device(num_chunks), core, tiled)

        def share(metered: MemoryCore) -> SharedMemory:
            return SharedMemory(metered, elastic, bench.need)

    def swap(metered: MemoryCore) -> Swapping:
        buffer = PageBuffer(layout.groups, int(side.buffer_gib * GIB) // layout.large_page_bytes)
        model = AnalyticModel(bench.machine.profile, bench.machine.cost)
        rule = ByCost(model, bench.bytes_per_second, limits.max_num_batched_tokens)
        return Swapping(metered, buffer, rule)

    def park(metered: MemoryCore, swapping: Swapping) -> Parking:
        sizes = CpuBuffer(swapping.buffer.num_large, is_fixed=side.fixed)
        sizes.logical_chunks = sizes.physical_chunks if side.fixed else sizes.logical_chunks
        return Parking(metered, swapping, sizes, limits.min_chunk_tokens)

    asked = bench.objectives()
    assert asked.ttft_seconds is not None
    assert asked.tpot_seconds is not None
    machine: StepTimer = WithHostLink(bench.machine, layout, bench.bytes_per_second)
    rows = bench.rows(rate)
    replay = Replay(
        core,
        bench.shape.description.layers,
        limits,
        rows,
        "trace",
        machine,
        MonotonicClock(),
        memory=share,
        swapping=swap if side.buffer_gib else None,
        parking=park if side.ahead else None,
        lateness=LatenessWatch(
            EARLY * asked.ttft_seconds, EARLY * asked.tpot_seconds, INITIAL_EXPECTED_OUTPUT
        )
        if side.buffer_gib
        else None,
    )
    replay.run()
    seen = latencies(outcomes(replay.requests, rows), asked, replay.requests_refused)
    report = replay.report()
    kept = ("ttft_seconds", "tpot_seconds", "goodput", "slo_attainment", "request_rate")
    counted = ("batch_mean", "max_running", "preemptions", "virtual_seconds", "cpu_buffer")
    return {
        "rate": rate,
        **{name: seen[name] for name in kept},
        **{name: report[name] for name in counted},
    }


def goodput(bench: Bench, side: Side, rates: Sequence[float]) -> tuple[float, list[dict[str, Any]]]:
    """The highest of the rates that the side keeps up with (0: none), and the runs that tell.

    Rates are halved in, so of twelve a side is looked at four times at most.
    """
    low, high, seen = -1, len(rates), list[dict[str, Any]]()
    while high - low > 1:
        middle = (low + high) // 2
        seen.append(run(bench, side, rates[middle]))
        if seen[-1]["slo_attainment"] >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return (rates[low] if low >= 0 else 0.0), sorted(seen, key=lambda s: s["rate"])


def make_bench(case: Case, hardware: str, link: str) -> Bench:
    """Shape, machine and link of a case."""
    shape = read_shape(case.shape)
    return Bench(
        case,
        shape,
        activation_model(shape.config, shape.description, ELEMENT_BYTES),
        AnalyticMachine(
            load_profile(hardware), model_cost(shape.config, shape.description, ELEMENT_BYTES)
        ),
        load_link(link).bytes_per_second,
    )


def line(side: Side, best: float, seen: dict[str, Any]) -> str:
    """For people."""
    ttft, tpot = seen["ttft_seconds"], seen["tpot_seconds"]
    return (
        f"  {side.name:22} goodput {best:6.3f}/s; at {seen['rate']:.3f}/s TTFT "
        f"{ttft['mean']:8.2f} s (p90 {ttft['p90']:8.2f}), TPOT {1e3 * tpot['mean']:6.1f} ms, "
        f"batch {seen['batch_mean']:5.1f}, {seen['preemptions']} preemptions, "
        f"{100 * seen['slo_attainment']:.0f} % in time"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="a100-80", help="a profile's name")
    parser.add_argument("--link", default="pcie-4", help="to the host's memory, by name")
    parser.add_argument("--case", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument("--requests", type=int, help="of every case, if not its own number")
    parser.add_argument("--rate", type=float, help="all sides at this rate, and no search")
    parser.add_argument("--side", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Prints every side of every case."""
    args = arguments()
    found = []
    for named in [CASES[n] for n in args.case] if args.case else CASES:
        case = replace(named, requests=args.requests or named.requests)
        bench = make_bench(case, args.hardware, args.link)
        asked = bench.objectives()
        print(
            f"{case.shape}, {case.memory_gib} GiB, {case.workload}, {case.requests} requests; "
            f"objectives: TTFT {asked.ttft_seconds:.2f} s, TPOT {asked.tpot_seconds:.3f} s",
            flush=True,
        )
        sides = []
        for side in [SIDES[n] for n in args.side] if args.side else SIDES:
            best, runs = goodput(bench, side, (args.rate,) if args.rate else case.rates)
            print(line(side, best, max(runs, key=lambda r: r["rate"])), flush=True)
            sides.append({"side": asdict(side), "goodput": best, "runs": runs})
        found.append({"case": asdict(case), "objectives": asdict(asked), "sides": sides})
    if args.json:
        result = {"hardware": args.hardware, "link": args.link, "cases": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
