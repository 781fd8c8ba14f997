"""Long prompts packed into a pool: batch and waste beside one page size and an ideal packer."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from bench.replay.ideal import IdealCore
from bench.replay.shapes import ELEMENT_BYTES, Shape, read_shape
from kvell.cli.replay.command import replay_limits
from kvell.clock import MonotonicClock
from kvell.memory import Eviction, Layout, Manager, MemoryCore, create_core, plan_layout
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.generators import generate_trace
from kvell.vocabulary import GIB

SHAPE, TRACE, REQUESTS, DRAWS = "ministral-8b", "ministral-static", 20, 10
MEMORY_GIB = (24, 40, 60)


@dataclass(frozen=True)
class Packed:
    """One manager on one memory size; means over the draws.

    :param batch_saturated: mean over the steps that left a request waiting.
    """

    manager: str
    page_tokens: int
    memory_gib: int
    batch: float
    batch_saturated: float
    batch_of_draws: tuple[float, ...]
    waste: float
    waste_worst: float
    stranded: float
    preemptions: int


def packed(
    shape: Shape, manager: str, memory_gib: int, page_tokens: int = 16, eviction: Eviction = "lru"
) -> Packed:
    """Replay the ten draws; ``manager`` is one of ours, or ``ideal``."""
    pages: Manager = "paged" if manager == "paged" else "kvell"
    layout = plan_layout(
        shape.description.layers, memory_gib * GIB, manager=pages, page_tokens=page_tokens
    )
    reports = [
        replay_over(
            IdealCore(layout) if manager == "ideal" else create_core(layout, eviction=eviction),
            shape,
            layout,
            seed,
        )
        for seed in range(DRAWS)
    ]
    batches = tuple(report["batch_mean"] for report in reports)
    return Packed(
        manager,
        page_tokens,
        memory_gib,
        mean(batches),
        mean(report["batch_saturated_mean"] for report in reports),
        batches,
        mean(report["waste"] for report in reports),
        max(report["waste"] for report in reports),
        max(report["stranded"] for report in reports),
        sum(report["preemptions"] for report in reports),
    )


def replay_over(core: MemoryCore, shape: Shape, layout: Layout, seed: int) -> dict[str, Any]:
    """One draw over a memory core of the layout's size."""
    cost = model_cost(shape.config, shape.description, ELEMENT_BYTES)
    run = Replay(
        core,
        shape.description.layers,
        replay_limits(layout, shape.description.max_model_len),
        generate_trace(TRACE, REQUESTS, seed),
        "start",
        Machine(load_profile(DEFAULT_HARDWARE), cost),
        MonotonicClock(),
    )
    run.run()
    return run.report()


def pack(eviction: Eviction) -> list[dict[str, Packed]]:
    """By memory size: ours, ours with pages of 8 tokens, one page size, and the ideal."""
    shape = read_shape(SHAPE)
    return [
        {
            "kvell": packed(shape, "kvell", gib, eviction=eviction),
            "kvell, 8 tokens": packed(shape, "kvell", gib, page_tokens=8, eviction=eviction),
            "paged": packed(shape, "paged", gib),
            "ideal": packed(shape, "ideal", gib),
        }
        for gib in MEMORY_GIB
    ]


def table_of_packing(sizes: Sequence[dict[str, Packed]]) -> Table:
    """A row for each memory size and manager."""
    title = f"{SHAPE}, {REQUESTS} requests of 55–110 thousand tokens, {DRAWS} draws"
    columns = ("batch", "waiting only", "/ paged", "/ ideal", "waste %", "worst %")
    table = Table("GiB", "manager", *columns, title=title)
    for size in sizes:
        for name, one in size.items():
            parts = (one.batch / size[other].batch for other in ("paged", "ideal"))
            wasted = (f"{100 * one.waste:.4f}", f"{100 * one.waste_worst:.4f}")
            batches = (f"{one.batch:.3f}", f"{one.batch_saturated:.3f}")
            cells = (*batches, *(f"{part:.3f}" for part in parts), *wasted)
            table.add_row(str(one.memory_gib), name, *cells)
    return table
