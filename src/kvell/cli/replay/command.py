"""``kvell replay``: the replay of a trace in virtual time, for a model and a memory size."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvell.byte_sizes import typed_bytes
from kvell.cli.replay.instances import hardware_prices
from kvell.cli.replay.models import ReplayModels, model_argument
from kvell.cli.replay.report import Report, print_report, print_together
from kvell.cli.replay.settings import ReplaySettings
from kvell.cli.replay.trace_file import token_counter
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.options import config_option, json_option, record_options
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, debug_option
from kvell.device.available import default_kv_memory_bytes
from kvell.errors import ChangeSomething
from kvell.memory import (
    GroupKind,
    LayerSpec,
    Layout,
    MemoryCore,
    longest_request,
    plan_layout,
)
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from kvell.engine.cpu_buffer.swapping import Swapping
    from kvell.engine.requests.limits import Limits
    from kvell.simulator.cluster.cluster import VirtualCluster
    from kvell.simulator.replay.runner import StepTimer
    from kvell.simulator.report.timeline import Timeline
    from kvell.simulator.traces.rows import TraceRow


@dataclass(frozen=True)
class BufferParts:
    """The parts of a replay with a CPU buffer."""

    machine: "StepTimer"
    swapping: Callable[[MemoryCore], "Swapping"]


def make_buffer(
    size_bytes: int, layout: Layout, machine: "StepTimer", weights: int, hardware: str
) -> BufferParts:
    """Return the buffer of an engine on this machine without latency objectives.

    :param weights: number of weights per token, by which copies are compared with recomputation.
    :raises ChangeSomething: if copies were not measured on the hardware, or the buffer is smaller
        than a large page.
    """
    from kvell.cost.swap_rule import rule_of_weights
    from kvell.elastic.page_buffer import PageBuffer
    from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
    from kvell.engine.cpu_buffer.swapping import Swapping
    from kvell.simulator.replay.host_link import calibrated_link
    from kvell.simulator.replay.runner import CalibratedMachine

    if not isinstance(machine, CalibratedMachine):
        problem = f"needs to know what copies take, which --hardware {hardware} does not say"
        raise ChangeSomething(
            "--cpu-buffer", typed_bytes(size_bytes), problem, "use a file of `kvell calibrate`"
        )
    count = size_bytes // layout.large_page_bytes
    if not count:
        problem = f"is less than a large page of the pool: {layout.large_page_bytes} bytes"
        remedy = f"use at least --cpu-buffer {-(-layout.large_page_bytes // MIB)}MiB"
        raise ChangeSomething("--cpu-buffer", typed_bytes(size_bytes), problem, remedy)
    rule = rule_of_weights(weights, machine.calibration.machine.device)

    def swapping(core: MemoryCore) -> Swapping:
        ledger = PageBuffer(layout.groups, count)
        return Swapping(core, ledger, rule, BufferedPrefixes(core, ledger, rule))

    return BufferParts(calibrated_link(machine, layout), swapping)


__all__ = ["images_in_text", "replay", "replay_limits"]

MAX_NUM_BATCHED_TOKENS = 8_192
MAX_NUM_SEQS = 256
MIN_MODEL_LEN = 2
"""The shortest context: one prompt token and one output token."""


@click.command(cls=EngineCommand)
@config_option
@model_argument
@record_options(ReplaySettings, "flags")
@json_option
@debug_option
@click.pass_obj
def replay(session: Session, flags: ReplaySettings, as_json: bool) -> None:
    """Replay a trace on the engine's own scheduler and memory core; no model is loaded."""
    from kvell.cli.replay.models import step_timer
    from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
    from kvell.simulator.cluster.meter import Metering
    from kvell.simulator.replay.runner import Acceptance
    from kvell.simulator.report.timeline import Timeline
    from kvell.simulator.traces.prompts import PromptMaker

    source, chosen, together = flags.source, flags.chosen, flags.together
    counts = together.counts()
    for flag, path in (("--requests-out", flags.requests_out), ("--timeline", flags.timeline_path)):
        require_directory(flag, path)
    rows = source.requests(token_counter(chosen.model, session))
    arrivals = "trace" if source.rate is not None else flags.arrivals
    models = chosen.describe(session)
    pool_bytes = flags.kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    layout = plan_layout(models.layers, pool_bytes, manager=flags.manager)
    machine = step_timer(
        flags.hardware, chosen.model, chosen.dtype, models, any_machine=flags.any_machine
    )
    limits = _limits_of(flags, models, layout)
    swapping = None
    links = None if counts is None else together.links(flags.hardware, machine, counts)
    prices = hardware_prices(machine, links, models.layers, flags.max_num_batched_tokens)
    if flags.cpu_buffer_bytes is not None:
        weights = models.cost.weight_bytes // chosen.number_bytes
        buffer = make_buffer(flags.cpu_buffer_bytes, layout, machine, weights, flags.hardware)
        machine = buffer.machine
        swapping = buffer.swapping
    timeline = Timeline() if flags.timeline_path else None
    run = VirtualCluster(
        ClusterSpec(
            counts or ALONE,
            layout,
            limits,
            machine,
            links,
            together.routing,
            together.caching,
            eviction=flags.eviction,
            hosts=together.hosts(machine),
            costs=prices,
            moves=together.relief,
        ),
        rows,
        arrivals,
        sessions=not flags.ignore_sessions,
        prompts=PromptMaker(rows, images_in_text(models.layers)),
        parts=EngineParts(swapping=swapping),
        metering=Metering(models.layers, timeline=timeline),
        acceptance=Acceptance(chosen.draft_tokens.acceptance, source.seed),
    )
    with progress_bar("replaying") as progress:
        run.run(lambda fraction: progress("replaying", fraction))
    _report(flags, run, rows, timeline, as_json=as_json)


def _limits_of(flags: ReplaySettings, models: ReplayModels, layout: Layout) -> "Limits":
    from kvell.engine.planning.whole_prompts import without_chunks

    limits = replay_limits(layout, models.max_model_len, common_pool=flags.common_pool)
    limits = replace(
        flags.chosen.draft_tokens.within(limits, models),
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
    )
    return limits if flags.enable_chunked_prefill else without_chunks(limits, layout)


def _report(
    flags: ReplaySettings,
    run: "VirtualCluster",
    rows: "Sequence[TraceRow]",
    timeline: "Timeline | None",
    *,
    as_json: bool,
) -> None:
    """Write the timeline and the requests' lines, and print the figures of a run."""
    from kvell.cli.replay.report import latencies, outcomes
    from kvell.load.report import Objectives
    from kvell.simulator.cluster.figures import cluster_figures, engine_figures
    from kvell.simulator.report.timeline import write_timeline

    if flags.timeline_path is not None and timeline is not None:
        with writing("--timeline", flags.timeline_path):
            write_timeline(flags.timeline_path, timeline.moments)
    requests = run.front.requests
    _write_requests(flags.requests_out, requests)
    together = flags.together.counts() is not None
    figures = cluster_figures(run) if together else engine_figures(run)
    objectives = Objectives(flags.slo_ttft, flags.slo_tpot)
    seen = latencies(outcomes(requests, rows), objectives, figures["requests_refused"])
    title = {"model": flags.chosen.model, "trace": flags.source.trace, "manager": flags.manager}
    _give(title | seen | figures, print_together if together else print_report, as_json=as_json)


def _give(report: Report, print_tables: Callable[[Report], None], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_tables(report)


def _write_requests(path: Path | None, requests: Sequence[Any]) -> None:
    if path is None:
        return
    lines = [json.dumps(asdict(figures)) + "\n" for figures in requests]
    with writing("--requests-out", path):
        path.write_text("".join(lines))


def replay_limits(layout: Layout, own_model_len: int, *, common_pool: bool = False) -> Any:
    """Return the limits of a replay: requests may be as long as the model and the pool allow.

    :raises ChangeSomething: if the pool is too small for any request.
    """
    from kvell.engine.requests.limits import Limits

    chunk_tokens = Limits().min_chunk_tokens
    longest = longest_request(layout, own_model_len, chunk_tokens)
    if longest < MIN_MODEL_LEN:
        raise ChangeSomething(
            "--kv-memory",
            typed_bytes(layout.pool_bytes),
            "holds no request of this model",
            "use more",
        )
    return Limits(MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, longest, common_pool=common_pool)


def images_in_text(layers: Sequence[LayerSpec]) -> bool:
    """Return whether the prompt includes an image's tokens; not with cross-attention."""
    return not any(layer.kind is GroupKind.CROSS for layer in layers)
