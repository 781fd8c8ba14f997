"""``kvell replay``: the replay of a trace in virtual time, for a model and a memory size."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import click

from kvell.byte_sizes import typed_bytes
from kvell.cli.replay.buffer import make_buffer
from kvell.cli.replay.instances import Together, instances_options
from kvell.cli.replay.models import ModelFlags, model_options
from kvell.cli.replay.report import Report, print_report, print_together
from kvell.cli.replay.trace_file import TraceFlags, token_counter, trace_options
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.options import (
    json_option,
    setting_option,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, debug_option
from kvell.cli.terminal.sizes import POSITIVE
from kvell.device.available import default_kv_memory_bytes
from kvell.errors import ChangeSomething
from kvell.memory import (
    EVICTIONS,
    Eviction,
    GroupKind,
    LayerSpec,
    Layout,
    longest_request,
    plan_layout,
)
from kvell.pages.sizing import Manager

__all__ = ["images_in_text", "replay", "replay_limits"]

MAX_NUM_BATCHED_TOKENS = 8_192
MAX_NUM_SEQS = 256
MIN_MODEL_LEN = 2
"""The shortest context: one prompt token and one output token."""


@click.command(cls=EngineCommand)
@trace_options
@model_options
@setting_option("kv_memory_bytes")
@setting_option("cpu_buffer_bytes")
@setting_option("manager")
@click.option(
    "--arrivals",
    type=click.Choice(["start", "trace"]),
    default="start",
    show_default=True,
    help="All requests arrive at the start, or each at its time in the trace.",
)
@click.option(
    "--hardware",
    default="a100-80",
    show_default=True,
    help="How long a step takes: a profile's name, a TOML file, or what `calibrate` wrote.",
)
@click.option(
    "--any-machine",
    is_flag=True,
    help="Accept a calibration of another machine or version.",
)
@click.option("--slo-ttft", type=POSITIVE, metavar="SECONDS", help="Time limit to the first token.")
@click.option("--slo-tpot", type=POSITIVE, metavar="SECONDS", help="Time limit per further token.")
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Maximum tokens of one step; a server's default is 2048.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of requests that run together.",
)
@setting_option("enable_chunked_prefill")
@click.option(
    "--common-pool/--no-common-pool",
    default=False,
    show_default=True,
    help="Protect prefixes that several requests share.",
)
@click.option(
    "--eviction",
    type=click.Choice(EVICTIONS),
    default="lru",
    show_default=True,
    help="Prefixes to evict first: the least recently used, or those least likely to return.",
)
@instances_options
@click.option(
    "--ignore-sessions", is_flag=True, help="Do not delay a turn until the previous answer ends."
)
@click.option(
    "--requests-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a JSON line per request.",
)
@click.option(
    "--timeline",
    "timeline_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a JSON line per sampled step, for `kvell plot`; gzipped if it ends in .gz.",
)
@json_option
@debug_option
@click.pass_obj
def replay(
    session: Session,
    source: TraceFlags,
    chosen: ModelFlags,
    kv_memory_bytes: int | None,
    cpu_buffer_bytes: int | None,
    manager: Manager,
    arrivals: Literal["start", "trace"],
    hardware: str,
    any_machine: bool,
    slo_ttft: float | None,
    slo_tpot: float | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    enable_chunked_prefill: bool,
    common_pool: bool,
    eviction: Eviction,
    together: Together,
    ignore_sessions: bool,
    requests_out: Path | None,
    timeline_path: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace on the engine's own scheduler and memory core; no model is loaded."""
    from kvell.cli.replay.hardware import step_timer
    from kvell.cli.replay.latency import latencies, outcomes
    from kvell.engine.planning.whole_prompts import without_chunks
    from kvell.load.report import Objectives
    from kvell.simulator.cluster.cluster import ALONE, ClusterSpec, EngineParts, VirtualCluster
    from kvell.simulator.cluster.figures import cluster_figures, engine_figures
    from kvell.simulator.cluster.meter import Metering
    from kvell.simulator.replay.runner import Acceptance
    from kvell.simulator.report.timeline import Timeline, write_timeline
    from kvell.simulator.traces.prompts import PromptMaker

    counts = together.counts()
    for flag, path in (("--requests-out", requests_out), ("--timeline", timeline_path)):
        require_directory(flag, path)
    rows = source.requests(token_counter(chosen.model, session))
    arrivals = "trace" if source.rate is not None else arrivals
    draft_tokens, models = chosen.draft_tokens, chosen.describe(session)
    pool_bytes = kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    layout = plan_layout(models.layers, pool_bytes, manager=manager)
    machine = step_timer(hardware, chosen.model, chosen.dtype, models, any_machine=any_machine)
    limits = replay_limits(layout, models.max_model_len, common_pool=common_pool)
    limits = replace(
        draft_tokens.within(limits, models),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    if not enable_chunked_prefill:
        limits = without_chunks(limits, layout)
    objectives = Objectives(slo_ttft, slo_tpot)
    title = {"model": chosen.model, "trace": source.trace, "manager": manager}
    swapping, links, hosts = None, None, together.hosts(machine)
    if counts is not None:
        has_buffer = cpu_buffer_bytes is not None
        links = together.links(hardware, machine, counts, limits, has_buffer=has_buffer)
    if cpu_buffer_bytes is not None:
        weights = models.cost.weight_bytes // chosen.number_bytes
        buffer = make_buffer(cpu_buffer_bytes, layout, machine, weights, hardware)
        machine, swapping = buffer.machine, buffer.swapping
    timeline = Timeline() if timeline_path else None
    run = VirtualCluster(
        ClusterSpec(
            *(counts or ALONE, layout, limits, machine, links, together.routing, together.caching),
            eviction=eviction,
            hosts=hosts,
        ),
        rows,
        arrivals,
        sessions=not ignore_sessions,
        prompts=PromptMaker(rows, images_in_text(models.layers)),
        parts=EngineParts(swapping=swapping),
        metering=Metering(models.layers, timeline=timeline),
        acceptance=Acceptance(draft_tokens.acceptance, source.seed),
    )
    with progress_bar("replaying") as progress:
        run.run(lambda fraction: progress("replaying", fraction))
    requests = run.front.requests
    _write_requests(requests_out, requests)
    if timeline_path is not None and timeline is not None:
        with writing("--timeline", timeline_path):
            write_timeline(timeline_path, timeline.moments)
    figures = cluster_figures(run) if counts else engine_figures(run)
    seen = latencies(outcomes(requests, rows), objectives, figures["requests_refused"])
    _give(title | seen | figures, print_together if counts else print_report, as_json=as_json)


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
