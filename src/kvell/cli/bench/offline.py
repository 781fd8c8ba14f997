"""``kvell bench offline``: the throughput of the engine in this process."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvell.cli.bench.workload_options import (
    Source,
    check_results,
    give_results,
    results_option,
    vocab_size_option,
)
from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.options import (
    engine_command,
    engine_options,
    record_options,
    require_one_model,
    with_kv_memory,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.tables import made_table
from kvell.engine.setup.engine_settings import EngineSettings


@engine_command
@record_options(Source, "source")
@vocab_size_option
@results_option
@engine_options
@click.pass_obj
def offline(
    session: Session,
    /,
    settings: EngineSettings,
    source: Source,
    vocab_size: int,
    json_path: str | None,
) -> None:
    """Give the engine all requests at the start and measure how fast they are done.

    Turns of a session begin with made-up answers instead of the model's own, so that no turn
    waits for another.
    """
    require_one_model(settings)
    check_results(json_path)
    rows = source.rows()
    with progress_bar("loading") as progress:
        chosen = with_kv_memory(settings, session)
        model = session.open_model(chosen, session.cache_dir, progress, reads_text=True)
        progress("generating", 0.0)
        model.generate(*_requests(rows, source.seed, vocab_size))
    report = {
        "model": settings.model,
        "workload": source.name,
        "seed": source.seed,
        **throughput(model.stats()),
    }
    give_results(report, json_path, lambda: _print(report))


def _requests(rows: Sequence[Any], seed: int, vocab_size: int) -> tuple[list[Any], list[Any]]:
    """Return prompts, int32 ``[tokens]``, and sampling for greedy answers of exact length."""
    import numpy as np

    from kvell.engine.protocol.sampling_params import SamplingParams
    from kvell.load.prompts import whole_prompts

    prompts = [np.asarray(ids, np.int32) for ids in whole_prompts(rows, seed, vocab_size)]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=row.output_tokens, ignore_eos=True)
        for row in rows
    ]
    return prompts, sampling


def throughput(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run from the engine's stats; rates are per second."""
    seconds = float(stats["generation_seconds"])
    prompt_tokens = int(stats["prompt_tokens"])

    def rate(count: Any) -> float:
        return float(count) / seconds if seconds else 0.0

    return {
        "requests": int(stats["requests"]),
        "duration_seconds": seconds,
        "request_rate": rate(stats["requests"]),
        "input_tokens_per_second": rate(prompt_tokens),
        "output_tokens_per_second": rate(stats["output_tokens"]),
        "prompt_tokens": prompt_tokens,
        "output_tokens": int(stats["output_tokens"]),
        "peak_running": int(stats["max_running"]),
        "hit_rate": int(stats["cached_tokens"]) / prompt_tokens if prompt_tokens else 0.0,
        "preemptions": int(stats["preemptions"]),
    }


def _print(report: Mapping[str, Any]) -> None:
    rows = [
        ("requests", f"{report['requests']:,}"),
        ("seconds", f"{report['duration_seconds']:,.1f}"),
        ("requests/s", f"{report['request_rate']:,.2f}"),
        ("input tokens/s", f"{report['input_tokens_per_second']:,.1f}"),
        ("output tokens/s", f"{report['output_tokens_per_second']:,.1f}"),
        ("most running requests", f"{report['peak_running']:,}"),
        ("prompt tokens from the cache", f"{report['hit_rate']:.1%}"),
        ("preemptions", f"{report['preemptions']:,}"),
    ]
    title = f"{report['model']}, {report['workload']}"
    wide_console().print(made_table(title, ("figure", "value"), rows))
