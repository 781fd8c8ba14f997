"""Long prompts, then long answers, in virtual time: KV cache and activations in one pool or two.

See README.md beside this file.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench import result_file
from bench.elastic.activation_bytes import activation_model
from bench.replay.shapes import ELEMENT_BYTES, Shape, layout_of, read_shape
from kvell.elastic.arena import ActivationModel
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan
from kvell.memory import MemoryCore, VisibleCore, create_core
from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
from kvell.simulator.cluster.figures import engine_figures
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_profile
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB, MIB
from tests.device.fake_chunks import FakeChunks

K = 1 << 10
CHUNK_BYTES = 2 * MIB
MIN_CHUNK_TOKENS = 1 * K
"""A request is admitted if prefill chunks of this size fit: they keep a GPU busy."""
MAP_SECONDS, UNMAP_SECONDS = 12e-6, 3e-6
"""Cost of moving a chunk on the host within a step, first touch included (cost_table)."""


@dataclass(frozen=True)
class Case:
    """A shape, memory for KV and activations together, lengths, and a profile's name."""

    shape: str
    memory_gib: float
    prompt_tokens: int
    output_tokens: int
    requests: int
    hardware: str = "a100-80"


CASES = (
    Case("large/llama3-70b", 104, 128 * K, 8 * K, 6, "h200-x2"),
    Case("jamba-mini", 40, 128 * K, 8 * K, 18),
    Case("llama3-8b", 57, 128 * K, 8 * K, 6),
    Case("llama3-8b", 36, 128 * K, 8 * K, 4),
    Case("llama3-8b", 18.5, 32 * K, 2 * K, 24, "a100-40"),
    Case("jamba-mini", 40, 32 * K, 2 * K, 75),
    Case("llama3-8b", 57, 32 * K, 2 * K, 39),
)
"""What the weights leave of 90 % of the cards: 104 GiB of two of 141 GB (Llama 3 70B: 141 GB), 40
of two of 80 GB (Jamba Mini), 57 and 18.5 GiB of one of 80 and one of 40 GB (Llama 3 8B: 16 GB).  36
GiB holds one request of Llama's beside the reserve, and two without."""


@dataclass
class Phases:
    """Time, tokens and steps, by phase."""

    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    prefill_steps: int = 0


@dataclass(frozen=True)
class WatchedMachine(Machine):
    """A machine that counts steps that only decode, and charges for moving chunks.

    :param moved: (chunks mapped, chunks unmapped) so far.
    """

    phases: Phases = field(default_factory=Phases)
    moved: Callable[[], tuple[int, int]] = lambda: (0, 0)
    seen: list[int] = field(default_factory=lambda: [0, 0])

    def step_seconds(self, plan: StepPlan) -> float:
        """Seconds by the profile, plus the balloon's map and unmap calls."""
        mapped, unmapped = self.moved()
        moving = (mapped - self.seen[0]) * MAP_SECONDS + (unmapped - self.seen[1]) * UNMAP_SECONDS
        self.seen[:] = [mapped, unmapped]
        seconds = super().step_seconds(plan) + moving
        if any(work.count > 1 for work in plan.work):
            self.phases.prefill_seconds += seconds
            self.phases.prefill_steps += 1
        else:
            self.phases.decode_seconds += seconds
            self.phases.decode_tokens += plan.num_tokens
            self.phases.decode_steps += 1
        return seconds


@dataclass(frozen=True)
class Figures:
    """One side of one case."""

    side: str
    batch_decoding: float
    batch_most: int
    decode_tokens_per_second: float
    total_tokens_per_second: float
    seconds: float
    preemptions: int
    kv_gib: float
    reserve_gib: float
    most_activations_gib: float = 0.0
    chunks_mapped: int = 0
    moving_share: float = 0.0
    planning_ms_per_step: float = 0.0


def rows_of(case: Case) -> list[TraceRow]:
    """Unrelated requests of one length, all waiting at the start."""
    return [TraceRow(0.0, case.prompt_tokens, case.output_tokens) for _ in range(case.requests)]


def limits_of(case: Case) -> Limits:
    """Limits of both sides: one step may compute the longest prompt whole."""
    return Limits(
        max_num_batched_tokens=case.prompt_tokens,
        max_model_len=case.prompt_tokens + case.output_tokens + 1,
        min_chunk_tokens=MIN_CHUNK_TOKENS,
    )


def static(case: Case, shape: Shape, need: ActivationModel, hardware: str) -> Figures:
    """Run with a reserve for the largest step, and KV in the rest."""
    limits = limits_of(case)
    reserve_bytes = need.need_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    kv_bytes = int(case.memory_gib * GIB) - reserve_bytes
    core = create_core(layout_of(shape, kv_bytes))
    machine = WatchedMachine(
        load_profile(hardware), model_cost(shape.config, shape.description, ELEMENT_BYTES)
    )
    run = _run(case, shape, core, machine)
    return replace(
        _figures("static", run, machine), kv_gib=kv_bytes / GIB, reserve_gib=reserve_bytes / GIB
    )


def elastic(case: Case, shape: Shape, need: ActivationModel, hardware: str) -> Figures:
    """Run with one pool for KV and activations."""
    num_chunks = int(case.memory_gib * GIB) // CHUNK_BYTES
    layout = layout_of(shape, num_chunks * CHUNK_BYTES)
    core = create_core(layout)
    tiled = Tiling(num_chunks, CHUNK_BYTES, layout.large_page_bytes, layout.num_large_pages)
    memory = ElasticMemory(counting_device(num_chunks), core, tiled)
    machine = WatchedMachine(
        load_profile(hardware),
        model_cost(shape.config, shape.description, ELEMENT_BYTES),
        moved=lambda: (memory.counts.mapped, memory.counts.unmapped),
    )
    shared: list[SharedMemory] = []

    def share(metered: MemoryCore) -> SharedMemory:
        shared.append(SharedMemory(metered, memory, need))
        return shared[0]

    run = _run(case, shape, core, machine, share)
    figures = _figures("elastic", run, machine)
    counts = memory.counts
    moving = counts.mapped * MAP_SECONDS + counts.unmapped * UNMAP_SECONDS
    return replace(
        figures,
        kv_gib=layout.pool_bytes / GIB,
        most_activations_gib=shared[0].most_activation_chunks * CHUNK_BYTES / GIB,
        chunks_mapped=counts.mapped,
        moving_share=moving / figures.seconds,
    )


def counting_device(num_chunks: int) -> FakeChunks:
    """A device whose chunks have no bytes: it only tracks mappings."""
    return FakeChunks(num_chunks, CHUNK_BYTES, has_bytes=False)


def _run(
    case: Case,
    shape: Shape,
    core: VisibleCore,
    machine: Machine,
    share: Callable[[MemoryCore], SharedMemory] | None = None,
) -> VirtualCluster:
    run = VirtualCluster(
        ClusterSpec(ALONE, core.layout, limits_of(case), machine),
        rows_of(case),
        "start",
        parts=EngineParts(lambda: core, share),
        metering=Metering(shape.description.layers),
    )
    run.run()
    return run


def _figures(side: str, run: VirtualCluster, machine: WatchedMachine) -> Figures:
    report, phases = engine_figures(run), machine.phases
    tokens = sum(request.prompt_tokens for request in run.front.requests) + report["output_tokens"]
    return Figures(
        side,
        phases.decode_tokens / max(1, phases.decode_steps),
        report["max_running"],
        phases.decode_tokens / max(1e-9, phases.decode_seconds),
        tokens / report["virtual_seconds"],
        report["virtual_seconds"],
        report["preemptions"],
        0.0,
        0.0,
        planning_ms_per_step=1e3 * report["wall_seconds"] / report["steps"],
    )


def compare(case: Case, hardware: str) -> tuple[Figures, Figures]:
    """Run both sides of a case."""
    shape = read_shape(case.shape)
    need = activation_model(shape.config, shape.description, ELEMENT_BYTES)
    return static(case, shape, need, hardware), elastic(case, shape, need, hardware)


def lines(case: Case, sides: Sequence[Figures]) -> list[str]:
    """The report as text."""
    rigid, free = sides
    return [
        f"{case.shape}, {case.memory_gib} GiB, {case.prompt_tokens // K}K in, "
        f"{case.output_tokens // K}K out, {case.requests} requests: "
        f"batch {free.batch_decoding / rigid.batch_decoding:.2f}x, "
        f"decode {free.decode_tokens_per_second / rigid.decode_tokens_per_second:.2f}x, "
        f"total {free.total_tokens_per_second / rigid.total_tokens_per_second:.2f}x",
        *(
            f"  {f.side:8} batch {f.batch_decoding:6.2f} (most {f.batch_most}), decode "
            f"{f.decode_tokens_per_second:7.1f}/s, total {f.total_tokens_per_second:7.0f}/s, "
            f"KV {f.kv_gib:.1f} GiB, reserve {f.reserve_gib:.1f} GiB, activations up to "
            f"{f.most_activations_gib:.1f} GiB, {f.preemptions} preemptions, "
            f"moving {100 * f.moving_share:.3f} %"
            for f in sides
        ),
    ]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="a profile's name, if not each case's own")
    parser.add_argument("--case", type=int, nargs="+", help="only these, by number from 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> None:
    """Print both sides of every case."""
    args = arguments()
    found = []
    for case in [CASES[n] for n in args.case] if args.case else CASES:
        sides = compare(case, args.hardware or case.hardware)
        print("\n".join(lines(case, sides)), flush=True)
        found.append({"case": asdict(case), "sides": [asdict(side) for side in sides]})
    if args.json:
        result = {"cases": found}
        result_file.write(args.json, result, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
