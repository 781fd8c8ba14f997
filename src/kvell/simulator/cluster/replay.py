"""Replay of a trace in virtual time on one engine: a metered cluster of one instance."""

from collections.abc import Callable, Sequence
from typing import Any

from kvell.clock import Clock
from kvell.engine.core.core import EngineCore
from kvell.engine.core.lateness import LatenessWatch
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.requests.limits import Limits
from kvell.memory import HoldingCore, LayerSpec, MemoryCore
from kvell.simulator.cluster.cluster import ClusterSpec, EngineParts, VirtualCluster
from kvell.simulator.cluster.instance import VirtualInstance
from kvell.simulator.cluster.meter import Metering
from kvell.simulator.replay.request_figures import RequestFigures
from kvell.simulator.replay.runner import Acceptance, StepTimer
from kvell.simulator.replay.schedule import Arrivals
from kvell.simulator.report.metrics import StepMeans
from kvell.simulator.report.timeline import Timeline
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow

NAME = "mixed-0"


class Replay(VirtualCluster):
    """One run of one trace; call :meth:`run` once, then read figures.

    :param core: an empty memory core.
    :param layers: the model's layers, which determine the tokens that are still needed.
    :param limits: ``max_model_len`` decides which requests are refused.
    :param machine: gives each step its duration in virtual time.
    :param wall: measures the duration of the replay itself.
    :param records: whether the engine's inputs and plans are recorded.
    :param timeline: is offered every step.
    :param sessions: whether a turn waits for the one before it (see :class:`.Schedule`).
    :param images_in_text: whether an image's tokens are tokens of the prompt.
    :param acceptance: decides which draft tokens are accepted, if ``limits`` allow any.
    :param memory: makes the sharing of the pool with activations, from the core.
    :param swapping: makes the CPU buffer, from the core.
    :param parking: makes the component that prefills ahead of decodes, from core and buffer.
    :param lateness: reports late requests to the engine, if given.
    :param look_every: see :class:`.Metering`.
    """

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
        memory: Callable[[MemoryCore], StepMemory] | None = None,
        swapping: Callable[[MemoryCore], Swapping] | None = None,
        parking: Callable[[MemoryCore, Swapping], Parking] | None = None,
        lateness: LatenessWatch | None = None,
        look_every: int = 1,
    ) -> None:
        super().__init__(
            ClusterSpec({"mixed": 1}, core.layout, limits, machine, None, "round-robin"),
            rows,
            arrivals,
            sessions=sessions,
            prompts=PromptMaker(rows, images_in_text),
            records=records,
            parts=EngineParts(
                lambda: core,
                memory,
                swapping,
                parking,
                None if lateness is None else lambda: lateness,
            ),
            metering=Metering(layers, look_every, timeline),
            acceptance=acceptance,
        )
        self._wall, self._wall_seconds = wall, 0.0

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Run until every request is finished or refused."""
        began_seconds = self._wall.now_seconds()
        super().run(progress)
        self._wall_seconds = self._wall.now_seconds() - began_seconds

    @property
    def instance(self) -> VirtualInstance:
        """The instance, once it has started."""
        return self.instances[NAME]

    @property
    def engine(self) -> EngineCore:
        """The instance's engine core."""
        return self.instance.core

    @property
    def means(self) -> StepMeans:
        """The samples of all steps."""
        return self.instance.meter.means

    @property
    def requests(self) -> Sequence[RequestFigures]:
        """The figures of each request, by index."""
        return self.front.requests

    @property
    def requests_refused(self) -> int:
        """Number of requests that could not be served."""
        return len(self.requests) - self.front.num_finished

    def report(self) -> dict[str, Any]:
        """Return the figures of the run under the names that every bench uses."""
        stats, engine, meter = self.engine.stats(), self.engine, self.instance.meter
        seconds, steps = self.loop.now_seconds, engine.step
        every, saturated = meter.means.means(), meter.means.means(saturated=True)
        manager_us = meter.memory.nanoseconds / 1e3
        groups = [
            figures | {"evicted_pages": group.evicted_pages, "hit_tokens": group.hit_tokens}
            for figures, group in zip(meter.means.group_figures(), stats.groups, strict=True)
        ]
        return {
            "requests_finished": self.front.num_finished,
            "requests_refused": self.requests_refused,
            "steps": steps,
            "batch_mean": every.batch,
            "hit_rate": stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
            "waste": every.waste,
            "stranded": every.stranded,
            "manager_us_per_step": manager_us / max(1, steps),
            "manager_us_per_request_step": manager_us / max(1, meter.scheduled),
            "short_of_memory": meter.short_of_memory / max(1, steps),
            "preemptions": stats.preemptions,
            "protected_prefixes": stats.protected_prefixes,
            "protected_tokens": stats.protected_tokens,
            "kv_memory_bytes": self.spec.layout.pool_bytes,
            "wall_seconds": self._wall_seconds,
            "batch_saturated_mean": saturated.batch,
            "waste_saturated": saturated.waste,
            "stranded_saturated": saturated.stranded,
            "virtual_seconds": seconds,
            "output_tokens": stats.output_tokens,
            "output_tokens_per_second": stats.output_tokens / max(1e-9, seconds),
            "spec_decode_drafts": stats.spec_decode_drafts,
            "spec_decode_draft_tokens": stats.spec_decode_draft_tokens,
            "spec_decode_accepted_tokens": stats.spec_decode_accepted_tokens,
            "max_running": engine.max_running,
            "max_model_len": engine.limits.max_model_len,
            "rungs": stats.rungs,
            "cpu_buffer": stats.buffer,
            "groups": groups,
        }
