"""``kvell replay``: the replay of a trace in virtual time, for a model and a memory size."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from kvell.byte_sizes import typed_bytes
from kvell.cli.replay.buffer import make_buffer
from kvell.cli.replay.instances import check_rows, replay_together
from kvell.cli.replay.models import DraftTokens, model_argument
from kvell.cli.replay.report import Report, print_report, print_together
from kvell.cli.replay.settings import ReplaySettings
from kvell.cli.replay.trace_file import token_counter
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.options import config_option, json_option, record_options
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, debug_option
from kvell.clock import MonotonicClock
from kvell.device.available import default_kv_memory_bytes
from kvell.errors import ChangeSomething
from kvell.memory import (
    GroupKind,
    LayerSpec,
    Layout,
    create_core,
    longest_request,
    plan_layout,
)

__all__ = ["images_in_text", "replay", "replay_limits"]

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
    from kvell.cli.replay.hardware import step_timer
    from kvell.cli.replay.latency import latencies, outcomes
    from kvell.engine.planning.whole_prompts import without_chunks
    from kvell.load.report import Objectives
    from kvell.simulator.cluster.cluster import ClusterSpec
    from kvell.simulator.cluster.network import Links
    from kvell.simulator.replay.replay import Replay
    from kvell.simulator.replay.runner import Acceptance
    from kvell.simulator.report.timeline import Timeline, write_timeline

    source, chosen, together = flags.source, flags.chosen, flags.together
    counts = together.counts()
    for flag, path in (("--requests-out", flags.requests_out), ("--timeline", flags.timeline_path)):
        require_directory(flag, path)
    rows = source.requests(token_counter(chosen.model, session))
    arrivals = "trace" if source.rate is not None else flags.arrivals
    draft_tokens = chosen.draft_tokens
    models = chosen.describe(session)
    pool_bytes = flags.kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    layout = plan_layout(models.layers, pool_bytes, manager=flags.manager)
    machine = step_timer(
        flags.hardware, chosen.model, chosen.dtype, models, any_machine=flags.any_machine
    )
    limits = replay_limits(layout, models.max_model_len, common_pool=flags.common_pool)
    limits = replace(
        draft_tokens.within(limits, models),
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
    )
    if not flags.enable_chunked_prefill:
        limits = without_chunks(limits, layout)
    objectives = Objectives(flags.slo_ttft, flags.slo_tpot)
    title = {"model": chosen.model, "trace": source.trace, "manager": flags.manager}
    if counts is not None:
        check_rows(rows, arrivals)
        _check_alone(draft_tokens, flags.timeline_path, flags.cpu_buffer_bytes)
        spec = ClusterSpec(
            *(counts, layout, limits, machine, Links(together.pages_link(flags.hardware, machine))),
            *(together.routing, together.caching),
            eviction=flags.eviction,
            hosts=together.hosts(machine),
        )
        with progress_bar("replaying") as progress:
            figures, requests = replay_together(
                *(spec, rows, models.layers),
                sessions=not flags.ignore_sessions,
                progress=lambda fraction: progress("replaying", fraction),
            )
        _write_requests(flags.requests_out, requests)
        seen = latencies(outcomes(requests, rows), objectives, figures["requests_refused"])
        _give(title | seen | figures, print_together, as_json=as_json)
        return
    swapping = None
    if flags.cpu_buffer_bytes is not None:
        weights = models.cost.weight_bytes // chosen.number_bytes
        buffer = make_buffer(flags.cpu_buffer_bytes, layout, machine, weights, flags.hardware)
        machine, swapping = buffer.machine, buffer.swapping
    timeline = Timeline() if flags.timeline_path else None
    run = Replay(
        create_core(layout, eviction=flags.eviction),
        models.layers,
        limits,
        rows,
        arrivals,
        machine,
        MonotonicClock(),
        timeline=timeline,
        swapping=swapping,
        sessions=not flags.ignore_sessions,
        images_in_text=images_in_text(models.layers),
        acceptance=Acceptance(draft_tokens.acceptance, source.seed),
    )
    with progress_bar("replaying") as progress:
        run.run(lambda fraction: progress("replaying", fraction))
    _write_requests(flags.requests_out, run.requests)
    if flags.timeline_path is not None and timeline is not None:
        with writing("--timeline", flags.timeline_path):
            write_timeline(flags.timeline_path, timeline.moments)
    seen = latencies(outcomes(run.requests, rows), objectives, run.requests_refused)
    _give(title | seen | run.report(), print_report, as_json=as_json)


def _give(report: Report, print_tables: Callable[[Report], None], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_tables(report)


def _check_alone(
    draft_tokens: DraftTokens, timeline_path: Path | None, cpu_buffer_bytes: int | None
) -> None:
    """Refuse flags that only the replay of one instance supports."""
    refused = {
        "--num-speculative-tokens": draft_tokens.num_speculative_tokens or None,
        "--timeline": timeline_path,
        "--cpu-buffer": cpu_buffer_bytes,
    }
    for flag, value in refused.items():
        if value is not None:
            problem = "is for the replay of one instance"
            raise ChangeSomething(flag, value, problem, "leave it out, or --instances")


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
    from kvell.simulator.replay.replay import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

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
