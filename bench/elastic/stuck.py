"""Chunks that no prompt can get because a used page covers each, by size of the large page.

See README.md beside this file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import result_file
from bench.elastic.offline import CHUNK_BYTES, counting_device
from bench.replay.shapes import ELEMENT_BYTES, Shape, read_shape
from kvell.clock import MonotonicClock
from kvell.elastic.memory import ElasticMemory
from kvell.elastic.tiling import Tiling, covering_bytes
from kvell.engine.planning.step_memory import SharedMemory
from kvell.engine.requests.limits import Limits
from kvell.memory import Layout, MemoryCore, create_core, plan_layout
from kvell.simulator.hardware.activation_bytes import activation_model
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.rows import TraceRow
from kvell.simulator.traces.trace import read_trace
from kvell.vocabulary import GIB, KIB

SHAPES = {"lfm2-1.2b": 1.0, "qwen2.5-vl-7b": 3.0, "gpt-oss-20b": 3.0, "llama3-8b": 8.0}
"""GiB for KV and activations together, by shape; large pages of 384 KiB to a whole chunk."""
HARDWARE = "h100"
TRACES = ("azure-2023-conv.jsonl.gz", "azure-2023-code.jsonl.gz")
REQUESTS = 600
STEP_TOKENS = 8192


@dataclass(frozen=True)
class Figures:
    """One shape on one trace, with large pages of one size.

    :param cut: prompts that were cut or had to wait because no chunk was available.
    """

    shape: str
    trace: str
    large_page_kib: float
    large_pages: int
    steps: int
    batch_mean: float
    hit_rate: float
    cut: int
    preemptions: int
    seconds: float


def layouts(shape: Shape, pool_bytes: int) -> tuple[Layout, Layout]:
    """Two layouts: large pages as small as the groups allow, and over whole chunks."""
    own = plan_layout(shape.description.layers, pool_bytes)
    large_bytes = covering_bytes(own.large_page_bytes, CHUNK_BYTES)
    return own, plan_layout(shape.description.layers, pool_bytes, large_page_bytes=large_bytes)


def replayed(shape: Shape, layout: Layout, rows: Sequence[TraceRow], trace: str) -> Figures:
    """The engine's own scheduler and memory core over one shared pool, in virtual time."""
    need = activation_model(shape.config, shape.description, ELEMENT_BYTES)
    num_chunks = layout.pool_bytes // CHUNK_BYTES + 1
    core = create_core(layout)
    tiled = Tiling(num_chunks, CHUNK_BYTES, layout.large_page_bytes, layout.num_large_pages)
    elastic = ElasticMemory(counting_device(num_chunks), core, tiled)

    def share(metered: MemoryCore) -> SharedMemory:
        return SharedMemory(metered, elastic, need)

    cost = model_cost(shape.config, shape.description, ELEMENT_BYTES)
    replay = Replay(
        core,
        shape.description.layers,
        Limits(max_num_batched_tokens=STEP_TOKENS, max_model_len=1 << 17),
        rows,
        "start",
        Machine(load_profile(HARDWARE), cost),
        MonotonicClock(),
        memory=share,
    )
    replay.run()
    report = replay.report()
    return Figures(
        shape.name,
        trace,
        layout.large_page_bytes / KIB,
        layout.num_large_pages,
        report["steps"],
        report["batch_mean"],
        report["hit_rate"],
        report["rungs"]["shrink_for_activations"],
        report["preemptions"],
        report["virtual_seconds"],
    )


def compared(name: str, gib: float, trace: Path, requests: int) -> tuple[Figures, Figures]:
    """Run both page sizes on the trace's first requests."""
    shape = read_shape(name)
    rows = list(read_trace(trace))[:requests]
    own, covering = layouts(shape, int(gib * GIB) // CHUNK_BYTES * CHUNK_BYTES)
    return (
        replayed(shape, own, rows, trace.name.split(".")[0]),
        replayed(shape, covering, rows, trace.name.split(".")[0]),
    )


def line(one: Figures) -> str:
    """One run as a line of text."""
    return (
        f"{one.shape:14} {one.trace:22} {one.large_page_kib:7,.0f} KiB × {one.large_pages:6,}: "
        f"{one.steps:6,} steps, batch {one.batch_mean:6.2f}, hits {one.hit_rate:.3f}, "
        f"{one.cut:6,} cut, {one.preemptions:3} preemptions, {one.seconds:7.1f} s"
    )


def main() -> None:
    """Print both page sizes of every shape on every trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("bench/traces"), metavar="DIR")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--requests", type=int, default=REQUESTS, help="a trace's first")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    found: list[Figures] = []
    for name in args.shapes:
        for trace in TRACES:
            found += compared(name, SHAPES[name], args.traces / trace, args.requests)
            print("\n".join(line(one) for one in found[-2:]), flush=True)
    if args.json:
        told = {"figures": [asdict(one) for one in found]}
        result_file.write(args.json, told, processor=result_file.VIRTUAL)


if __name__ == "__main__":
    main()
