"""Tiny replays whose figures can be worked out by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvell.clock import Clock, VirtualClock
from kvell.cost.analytic import DeviceProfile, ModelCost
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.requests.limits import Limits
from kvell.memory import (
    GroupKind,
    HoldingCore,
    LayerSpec,
    Layout,
    MemoryCore,
    create_core,
    longest_request,
    plan_layout,
)
from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
from kvell.simulator.cluster.figures import engine_figures
from kvell.simulator.cluster.instance import VirtualInstance
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.replay.request_figures import RequestFigures
from kvell.simulator.replay.runner import Acceptance, Machine, StepTimer
from kvell.simulator.replay.schedule import Arrivals
from kvell.simulator.report.metrics import StepMeans
from kvell.simulator.report.timeline import Timeline
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow

PROFILE = DeviceProfile("test", 1e9, 1.0, 1e9, 1.0, 1.0)
MACHINE = Machine(PROFILE, ModelCost(1, 0, 1))
"""A step takes about a second, whatever its work."""


def row(
    prompt: int, output: int, blocks: Sequence[int] = (), size: int = 4, at: float = 0.0
) -> TraceRow:
    """A trace row; ``size`` is the tokens of a block, if there are blocks."""
    return TraceRow(at, prompt, output, np.asarray(blocks, np.int64), size if blocks else 0)


def layout_of(*layers: tuple[int, int], large_pages: int = 64) -> Layout:
    """Layers of (window or 0, KV heads); a head's K and V are 32 bytes a token, pages 4 tokens."""
    specs = [layer_of(i, window, heads) for i, (window, heads) in enumerate(layers)]
    large_page_bytes = plan_layout(specs, 1 << 20, page_tokens=4).large_page_bytes
    return plan_layout(specs, large_page_bytes * large_pages, page_tokens=4)


def layer_of(index: int, window: int, heads: int) -> LayerSpec:
    """A layer whose K and V take 32 bytes a token and head."""
    kind = GroupKind.SLIDING if window else GroupKind.FULL
    return LayerSpec(index, kind, heads, 8, 2, window)


def layers_in(layout: Layout) -> list[LayerSpec]:
    return [
        layer_of(index, group.window_tokens, group.layer_token_bytes // 32)
        for group in layout.groups
        for index in group.layers
    ]


def limits_of(layout: Layout) -> Limits:
    """Steps of up to 64 tokens; requests as long as the pool holds."""
    longest = longest_request(layout, 400, 4)
    return Limits(64, 8, max_model_len=longest, min_chunk_tokens=4)


class Replay(VirtualCluster):
    """A metered cluster of one instance with parts of its own."""

    def __init__(
        self,
        core: HoldingCore,
        layers: Sequence[LayerSpec],
        limits: Limits,
        rows: Sequence[TraceRow],
        arrivals: Arrivals,
        machine: StepTimer,
        wall: Clock,
        *,
        records: bool = False,
        timeline: Timeline | None = None,
        sessions: bool = True,
        images_in_text: bool = True,
        acceptance: Acceptance | None = None,
        swapping: Callable[[MemoryCore], Swapping] | None = None,
        parking: Callable[[MemoryCore, Swapping], Parking] | None = None,
        look_every: int = 1,
    ) -> None:
        super().__init__(
            ClusterSpec(ALONE, core.layout, limits, machine),
            rows,
            arrivals,
            sessions=sessions,
            prompts=PromptMaker(rows, images_in_text),
            records=records,
            parts=EngineParts(lambda: core, swapping=swapping, parking=parking),
            metering=Metering(layers, look_every, timeline),
            acceptance=acceptance,
            wall=wall,
        )

    @property
    def instance(self) -> VirtualInstance:
        (instance,) = self.instances.values()
        return instance

    @property
    def entries(self) -> list[Any]:
        assert self.instance.record is not None
        return self.instance.record.journal.entries

    @property
    def engine(self) -> EngineCore:
        return self.instance.core

    @property
    def means(self) -> StepMeans:
        return self.instance.meter.means

    @property
    def requests(self) -> Sequence[RequestFigures]:
        return self.front.requests

    def report(self) -> dict[str, Any]:
        return engine_figures(self)


def make_replay(
    layout: Layout,
    rows: Sequence[TraceRow],
    arrivals: Arrivals = "start",
    journal: Journal | None = None,
    timeline: Timeline | None = None,
    *,
    sessions: bool = True,
    look_every: int = 1,
) -> Replay:
    replay = Replay(
        create_core(layout),
        layers_in(layout),
        limits_of(layout),
        rows,
        arrivals,
        MACHINE,
        VirtualClock(),
        records=journal is not None,
        timeline=timeline,
        sessions=sessions,
        look_every=look_every,
    )
    replay.run()
    if journal is not None:
        journal.entries += replay.entries
    return replay


def busy_rows(seed: int, count: int = 30) -> list[TraceRow]:
    """Requests of up to 80 tokens, half of them with one of three shared prefixes."""
    draw = np.random.default_rng(seed)
    heads = [list(range(10 * k, 10 * k + 6)) for k in range(3)]
    rows = []
    for i in range(count):
        head = heads[int(draw.integers(3))] if draw.random() < 0.5 else []
        prompt = 4 * len(head) + int(draw.integers(1, 40))
        rows.append(row(prompt, int(draw.integers(1, 16)), head, at=float(i)))
    return rows
