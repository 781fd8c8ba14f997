"""``kvell calibrate``: measured step times of this machine, in a file for ``kvell replay``."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.terminal.figures import wide_console
from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.options import (
    engine_command,
    engine_options,
    json_option,
    with_kv_memory,
)
from kvell.cli.terminal.progress import notice, progress_bar
from kvell.cli.terminal.session import Session
from kvell.cli.terminal.tables import made_table
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from kvell.calibration.run import Outcome
    from kvell.cost.calibration import Calibration

UNSUPPORTED = ("kv_budget", "speculative_model", "num_speculative_tokens", "quantization")
"""The settings whose steps the cost model cannot describe."""
MOST_ERROR = 0.25
"""The largest median error of a calibration whose predictions are of use."""


@engine_command
@engine_options
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of the calibration.  [default: MODEL.calibration.json]",
)
@click.option(
    "--serving/--no-serving",
    default=True,
    show_default=True,
    help="Also measure what HTTP adds to a step, with a server.",
)
@click.option("--quick", is_flag=True, help="Quick and less exact: fewer steps, timed twice.")
@json_option
@click.pass_obj
def calibrate(
    session: Session,
    /,
    settings: EngineSettings,
    out: Path | None,
    serving: bool,
    quick: bool,
    as_json: bool,
) -> None:
    """Time steps of the engine, fit a cost model, and report its error on other steps.

    Takes minutes on an idle machine. `kvell replay --hardware FILE` then says how long requests
    would take here.
    """
    out = out or Path(f"{Path(settings.model).name}.calibration.json")
    require_directory("--out", out)
    for name in UNSUPPORTED:
        if getattr(settings, name) not in (None, 0, "none"):
            flag = "--" + name.replace("_", "-")
            raise ChangeSomething(flag, getattr(settings, name), "cannot be calibrated", "drop it")
    settings = with_kv_memory(settings, session)
    with progress_bar("loading") as progress:
        outcome = run_calibration(session, settings, progress, quick=quick)
        made = outcome.calibration
        if serving:
            made = with_serving(made, settings, progress, quick=quick)
    with writing("--out", out):
        out.write_bytes(made.encode())
    report = {"file": str(out), **summary(made)}
    if problem := useless(report):
        notice(problem)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


def useless(report: Mapping[str, Any]) -> str:
    """Return the reason why a calibration predicts nothing, and what to do; "" if it does."""
    errors = {kind: report[f"{kind}_error"] for kind in ("prefill", "decode", "mixed")}
    kind = max(errors, key=lambda name: errors[name])
    if errors[kind] <= MOST_ERROR:
        return ""
    return (
        f"this calibration is useless: it misses {kind} steps by {errors[kind]:.0%} (median), and "
        f"repeats of one step differ by {report['noise']:.0%}; end other programs and run it again"
        " without --quick"
    )


def run_calibration(
    session: Session, settings: EngineSettings, progress: Any, *, quick: bool
) -> "Outcome":
    from kvell.calibration.run import calibrate
    from kvell.calibration.subject import load_subject
    from kvell.engine.setup.options import EngineOptions

    options = EngineOptions(
        kv_memory_bytes=settings.kv_memory_bytes,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        manager=settings.manager,
        memory_bytes=settings.memory_bytes,
    )
    subject = load_subject(
        settings.model,
        settings.dtype,
        settings.device,
        options,
        session.cache_dir,
        progress,
        settings.kv_cache_dtype,
        settings.threads,
    )
    return calibrate(subject, session.clock, progress, quick=quick, threads=settings.threads)


def with_serving(
    made: "Calibration", settings: EngineSettings, progress: Any, *, quick: bool
) -> "Calibration":
    """Add the costs of serving, measured on a server that is started for it."""
    from kvell.calibration.serving import ROUNDS, fit_serving, measure_serving, server

    progress("starting a server", 0.0)
    with server(serve_command(settings)) as url:
        rounds = 2 if quick else ROUNDS
        served, prompts = measure_serving(url, made.model.vocab_size, progress, rounds)
    return replace(made, serving=fit_serving(made, served, prompts))


def serve_command(settings: EngineSettings) -> list[str]:
    program = [sys.executable, "-m", "kvell.cli.main", "serve", "--port", "0", "--json"]
    return [*program, *settings.flags()]


def summary(made: "Calibration") -> dict[str, Any]:
    """Return the figures of a calibration: times in seconds, errors as fractions."""
    from kvell.cost.model import attended_tokens_per_second, decode_seconds, prefill_seconds

    return {
        "model": made.model.name,
        "dtype": made.model.dtype,
        "machine": f"{made.machine.processor}, {made.machine.cores} cores",
        "held_out_steps": made.held_out.steps,
        "prefill_error": made.held_out.prefill_error,
        "decode_error": made.held_out.decode_error,
        "mixed_error": made.held_out.mixed_error,
        "noise": made.noise,
        "prefill_1024_seconds": prefill_seconds(made, 1024, 0.0),
        "prefill_1024_half_cached_seconds": prefill_seconds(made, 1024, 0.5),
        "decode_1_seconds": decode_seconds(made, [256]),
        "decode_16_seconds": decode_seconds(made, [256] * 16),
        "attended_tokens_per_second": attended_tokens_per_second(made),
        "copy_bytes_per_second": made.copy_bytes_per_second,
        "page_copy_bytes_per_second": made.copies.bytes_per_second,
        "copies_under_pass": made.copies.are_under_pass,
        "copies_slow": made.copies.slows,
        **{f"serving_{name}": seconds for name, seconds in asdict(made.serving).items()},
    }


def _print(report: Mapping[str, Any]) -> None:
    def milliseconds(name: str) -> str:
        return f"{report[name] * 1000:,.2f} ms"

    rows = [
        ("median error, prefill steps", f"{report['prefill_error']:.1%}"),
        ("median error, decode steps", f"{report['decode_error']:.1%}"),
        ("median error, mixed steps", f"{report['mixed_error']:.1%}"),
        ("spread of one step's repeats", f"{report['noise']:.1%}"),
        ("prefill of 1,024 tokens", milliseconds("prefill_1024_seconds")),
        ("  half of them cached", milliseconds("prefill_1024_half_cached_seconds")),
        ("decode step, 1 request at 256 tokens", milliseconds("decode_1_seconds")),
        ("decode step, 16 requests", milliseconds("decode_16_seconds")),
        ("serving adds, each request", milliseconds("serving_request_seconds")),
        ("serving adds, each step", milliseconds("serving_step_seconds")),
        ("serving adds, each token", milliseconds("serving_token_seconds")),
        ("serving adds, each prompt token", milliseconds("serving_prompt_token_seconds")),
    ]
    if report["page_copy_bytes_per_second"]:
        rate = f"{report['page_copy_bytes_per_second'] / 1e9:,.1f} GB/s"
        place = "under" if report["copies_under_pass"] else "before"
        rows.append((f"copies to a CPU buffer, made {place} a pass here", rate))
        rows.append(("a second of them under a pass costs", f"{report['copies_slow']:.2f} s"))
    title = (
        f"{report['model']} in {report['dtype']} on {report['machine']}; "
        f"errors on {report['held_out_steps']} steps that the fit never saw"
    )
    wide_console().print(made_table(title, ("figure", "value"), rows))
    click.echo(f"kvell: wrote {report['file']}; kvell replay --hardware takes it", err=True)
