"""Requests that arrive one by one, in virtual time: goodput and latency of each side.

See README.md beside this file.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import result_file
from bench.elastic.activation_bytes import activation_model
from bench.elastic.offline import CHUNK_BYTES, MIN_CHUNK_TOKENS, counting_device
from bench.elastic.online_cases import (
    ATTAINMENT,
    BOTH,
    CASES,
    CHUNKED,
    CHUNKED_TOKENS,
    SIDES,
    SLACK,
    STATIC,
    Case,
    Side,
    write_part,
)
from bench.elastic.swap_by_cost import SwapByCost
from bench.replay.shapes import ELEMENT_BYTES, Shape, layout_of, read_shape
from kvell.cli.replay.report import latencies, outcomes
from kvell.cost.analytic import AnalyticModel
from kvell.cost.work import Chunk
from kvell.elastic.arena import ActivationModel
from kvell.elastic.logical_buffer import CpuBuffer
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.page_buffer import PageBuffer
from kvell.elastic.tiling import Tiling
from kvell.engine.core.lateness import LatenessWatch
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.admission import INITIAL_EXPECTED_OUTPUT
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.requests.limits import Limits
from kvell.load.arrivals import retime
from kvell.load.report import Objectives
from kvell.memory import Layout, MemoryCore, create_core
from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
from kvell.simulator.cluster.figures import engine_figures
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_link, load_profile
from kvell.simulator.replay.host_link import WAITS, WithHostLink
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB

ENOUGH_TOKENS = 2_048
"""Of prompts in a step, if there are several."""
LOOKS_EVERY = 16
"""Steps between two samples of the pool."""
LEAST_GAIN = 1.5
"""Least gain in goodput over each static side."""


class AnalyticMachine(Machine):
    """A machine that can also time arbitrary work."""

    def step_seconds_of(self, work: Sequence[Chunk]) -> float:
        """Seconds of a step."""
        return self.profile.step_seconds(self.cost.of_step(work))


Seen = dict[str, Any]
"""The figures of one run."""


@dataclass(frozen=True)
class Bench:
    """What all runs of a case share.

    :param streams: pages move layer by layer while others are computed, as eLLM assumes; else
        a step waits, as on our GPU runner.
    :param draw: seed of the workload's lengths and arrivals.
    """

    case: Case
    shape: Shape
    need: ActivationModel
    machine: AnalyticMachine
    bytes_per_second: float
    streams: bool = False
    draw: int = 0
    seen: dict[tuple[Side, float], Seen] = field(default_factory=dict)

    def rows(self, rate: float) -> list[TraceRow]:
        """The workload as a Poisson process."""
        rows = generate_trace(self.case.workload, self.case.requests, self.draw)
        return retime(rows, rate=rate, seed=self.draw)

    def limits(self, side: Side) -> Limits:
        """Limits of a side, which serves the model's whole context."""
        most = side.batched_tokens or self.case.context_tokens
        return Limits(
            max_num_batched_tokens=most,
            max_model_len=self.case.context_tokens,
            min_chunk_tokens=min(MIN_CHUNK_TOKENS, most),
            enough_prompt_tokens=ENOUGH_TOKENS,
            crowded_prompt_tokens=CHUNKED_TOKENS,
        )

    def objectives(self) -> Objectives:
        """:data:`SLACK` times the latencies of the mean request alone."""
        rows = self.rows(1.0)
        prompt = sum(row.prompt_tokens for row in rows) // len(rows)
        alone = self.machine.step_seconds_of([Chunk(0, prompt)])
        token = self.machine.step_seconds_of([Chunk(prompt, 1)])
        return Objectives(SLACK * alone, SLACK * token)

    def run(self, side: Side, rate: float) -> Seen:
        """One side at one rate; results are cached."""
        if (side, rate) not in self.seen:
            self.seen[side, rate] = run(self, side, rate)
        return self.seen[side, rate]


def pool_of(bench: Bench, side: Side, limits: Limits) -> tuple[Layout, int]:
    """The layout of pages, and the number of chunks for KV and activations together."""
    num_chunks = int(bench.case.memory_gib * GIB) // CHUNK_BYTES
    pool_bytes = num_chunks * CHUNK_BYTES
    if not side.shares:
        pool_bytes -= bench.need.need_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    return layout_of(bench.shape, pool_bytes), num_chunks


def parking_of(side: Side, core: MemoryCore, swapping: Swapping, limits: Limits) -> Parking:
    """Parking, which puts prompts ahead of decodes; buffer size by Algorithm 2, or fixed."""
    physical, is_fixed = swapping.buffer.num_large, side.fixed_gib is not None
    fixed = int((side.fixed_gib or 0) * GIB) // core.layout.large_page_bytes
    sizes = CpuBuffer(physical, fixed if is_fixed else 1, is_fixed=is_fixed)
    return Parking(core, swapping, sizes, limits.min_chunk_tokens)


def replay_of(bench: Bench, side: Side, rows: list[TraceRow]) -> VirtualCluster:
    """A replay with the engine's scheduler and memory core, memory divided as the side says."""
    limits = bench.limits(side)
    layout, num_chunks = pool_of(bench, side, limits)
    core = create_core(layout)
    share: Callable[[MemoryCore], SharedMemory] | None = None
    if side.shares:
        tiled = Tiling(num_chunks, CHUNK_BYTES, layout.large_page_bytes, layout.num_large_pages)
        elastic = ElasticMemory(counting_device(num_chunks), core, tiled)

        def share(metered: MemoryCore) -> SharedMemory:
            return SharedMemory(metered, elastic, bench.need)

    def swap(metered: MemoryCore) -> Swapping:
        num_large = int(bench.case.buffer_gib * GIB) // layout.large_page_bytes
        buffer = PageBuffer(layout.groups, num_large, is_far=True)
        model = AnalyticModel(bench.machine.profile, bench.machine.cost)
        rule = SwapByCost(model, bench.bytes_per_second, limits.max_num_batched_tokens)
        return Swapping(metered, buffer, rule)

    asked = bench.objectives()
    assert asked.ttft_seconds is not None
    assert asked.tpot_seconds is not None
    layers = len(bench.shape.description.layers) if bench.streams else WAITS
    watch = LatenessWatch.ahead_of(asked.ttft_seconds, asked.tpot_seconds, INITIAL_EXPECTED_OUTPUT)
    large = layout.num_large_pages if side.stages else None
    rate = bench.bytes_per_second
    machine = WithHostLink(bench.machine, layout, rate, streamed_layers=layers, buffer_large=large)
    return VirtualCluster(
        ClusterSpec(ALONE, layout, limits, machine),
        rows,
        sessions=False,
        parts=EngineParts(
            lambda: core,
            share,
            swap if side.buffers else None,
            lambda metered, swapping: parking_of(side, metered, swapping, limits),
            (lambda: watch) if side.buffers else None,
            large,
        ),
        metering=Metering(bench.shape.description.layers, LOOKS_EVERY),
    )


def run(bench: Bench, side: Side, rate: float) -> Seen:
    """One side at one rate: latencies, goodput, counters."""
    rows = bench.rows(rate)
    replay = replay_of(bench, side, rows)
    replay.run()
    report = engine_figures(replay)
    refused = report["requests_refused"]
    seen = latencies(outcomes(replay.front.requests, rows), bench.objectives(), refused)
    kept = ("ttft_seconds", "tpot_seconds", "goodput", "slo_attainment", "request_rate")
    counted = (
        "batch_mean",
        "max_running",
        "preemptions",
        "virtual_seconds",
        "output_tokens_per_second",
        "cpu_buffer",
    )
    return {
        "rate": rate,
        **{name: seen[name] for name in kept},
        **{name: report[name] for name in counted},
    }


def goodput(bench: Bench, side: Side) -> float:
    """The highest of the rates that the side keeps up with; 0 if none.

    A binary search: of sixteen rates four or five are run.
    """
    low, high = -1, len(bench.case.rates)
    while high - low > 1:
        middle = (low + high) // 2
        if bench.run(side, bench.case.rates[middle])["slo_attainment"] >= ATTAINMENT:
            low = middle
        else:
            high = middle
    return bench.case.rates[low] if low >= 0 else 0.0


def compared(bench: Bench) -> tuple[float, ...]:
    """Rates at which first tokens are compared: the lowest, and each side's goodput."""
    bests = {goodput(bench, side) for side in (STATIC, CHUNKED, BOTH)}
    return tuple(sorted({bench.case.rates[0], *bests} - {0.0}))


def verdicts(bench: Bench) -> list[str]:
    """What must hold of this bench, and whether it does."""
    best = {side: goodput(bench, side) for side in (STATIC, CHUNKED, BOTH)}
    told = []
    for side in (STATIC, CHUNKED):
        gain = best[BOTH] / best[side] if best[side] else float("inf")
        told.append(f"{_holds(gain >= LEAST_GAIN)}: goodput {gain:.2f} times {side.name}")
    for rate in compared(bench):
        first = [_mean(bench.run(side, rate), "ttft_seconds") for side in (STATIC, CHUNKED, BOTH)]
        told.append(
            f"{_holds(first[2] <= min(first[:2]))}: at {rate:.3f}/s TTFT {first[2]:.2f} s, "
            f"beside {first[0]:.2f} and {first[1]:.2f}"
        )
    return told


def _holds(is_true: bool) -> str:
    return "holds" if is_true else "FAILS"


def _mean(seen: Seen, name: str) -> float:
    return float(seen[name]["mean"])


def make_bench(case: Case, link: str, *, streams: bool = False) -> Bench:
    """Shape, machine and link of a case."""
    shape = read_shape(case.shape)
    return Bench(
        case,
        shape,
        activation_model(shape.config, shape.description, ELEMENT_BYTES),
        AnalyticMachine(
            load_profile(case.hardware),
            model_cost(shape.config, shape.description, ELEMENT_BYTES),
        ),
        load_link(link).bytes_per_second,
        streams,
    )


def line(name: str, seen: Seen) -> str:
    """One run as a line of text."""
    ttft, tpot = seen["ttft_seconds"], seen["tpot_seconds"]
    return (
        f"  {name:22} at {seen['rate']:.3f}/s TTFT {ttft['mean']:8.2f} s (p90 {ttft['p90']:8.2f}), "
        f"TPOT {1e3 * tpot['mean']:6.1f} ms, {seen['output_tokens_per_second']:6.0f} tokens/s, "
        f"batch {seen['batch_mean']:5.1f}, {seen['preemptions']:.0f} preemptions, "
        f"{seen['cpu_buffer'].get('parkings', 0):.0f} parked, "
        f"{100 * seen['slo_attainment']:.0f} % in time"
    )


def header(bench: Bench) -> str:
    """The case and its objectives as text."""
    case, asked = bench.case, bench.objectives()
    return (
        f"{case.shape}, {case.hardware}, {case.memory_gib} GiB, {case.workload}, "
        f"{case.requests} requests, buffer {case.buffer_gib:g} GiB; "
        f"objectives: TTFT {asked.ttft_seconds:.2f} s, TPOT {asked.tpot_seconds:.3f} s"
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="a profile's name, if not each case's own")
    parser.add_argument("--link", default="pcie-4", help="to the host's memory, by name")
    parser.add_argument("--streams", action="store_true", help="pages move under the pass: eLLM's")
    parser.add_argument("--case", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument("--requests", type=int, help="of every case, if not its own number")
    parser.add_argument("--rate", type=float, help="all sides at this rate, and no search")
    parser.add_argument("--side", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the cases' figures here too"
    )
    return parser.parse_args()


def searched(bench: Bench, sides: Iterable[Side]) -> list[dict[str, Any]]:
    """Search the goodput of each side; print each as it is found."""
    found = []
    for side in sides:
        best = goodput(bench, side)
        seen = bench.run(side, best or bench.case.rates[0])
        print(line(f"{side.name}: {best:.3f}/s", seen), flush=True)
        found.append({"side": asdict(side), "goodput": best})
    return found


def write_case(number: int, found: dict[str, Any], path: Path) -> None:
    """Write one case into the file of all cases; keep the others in it."""
    write_part("cases", str(number), found, path, processor=result_file.VIRTUAL)


def of_case(args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Run every side of one case and judge them; print as results come."""
    named = CASES[number]
    hardware = args.hardware or named.hardware
    case = replace(named, requests=args.requests or named.requests, hardware=hardware)
    bench = make_bench(case, args.link, streams=args.streams)
    sides = [SIDES[n] for n in args.side] if args.side else SIDES
    print(header(bench), flush=True)
    told: list[str] = []
    bests: list[dict[str, Any]] = []
    if args.rate:
        for side in sides:
            print(line(side.name, bench.run(side, args.rate)), flush=True)
    else:
        bests = searched(bench, sides)
        told = verdicts(bench) if set(SIDES[:3]) <= set(sides) else []
        print("\n".join(f"  {one}" for one in told), flush=True)
    return {
        "case": asdict(case),
        "link": args.link,
        "objectives": asdict(bench.objectives()),
        "goodput": bests,
        "verdicts": told,
        "runs": [asdict(side) | {"run": seen} for (side, _), seen in bench.seen.items()],
    }


def main() -> None:
    """Print every side of every case, and verdicts."""
    args = arguments()
    for number in args.case or range(len(CASES)):
        found = of_case(args, number)
        if args.json:
            write_case(number, found, args.json)


if __name__ == "__main__":
    main()
