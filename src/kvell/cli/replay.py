"""``kvell replay``: a trace against a model and a memory size, in virtual time."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click

from kvell.cli.options import (
    debug_option,
    dtype_option,
    json_option,
    kv_memory_option,
    manager_option,
)
from kvell.cli.plan import ELEMENT_BYTES, load_config
from kvell.cli.progress import progress_bar
from kvell.cli.replay_report import print_report
from kvell.cli.session import Session
from kvell.clock import MonotonicClock
from kvell.device.available import default_kv_memory_bytes
from kvell.errors import ChangeSomething
from kvell.memory import Layout, create_core, longest_request, plan_layout
from kvell.pages.sizing import Manager

CONFIGS = Path("bench", "configs")
REPOSITORY = Path(__file__).resolve().parents[3]
"""Where the named configs lie when Kvell runs from its repository."""
MIN_MODEL_LEN = 2
"""A prompt of one token and one token of output."""


@click.command()
@click.option("--trace", required=True, help="A trace file, or the name of a generator like chat.")
@click.option("--model", required=True, help="A name in bench/configs, or what `plan` takes.")
@kv_memory_option
@dtype_option
@manager_option
@click.option(
    "--arrivals",
    type=click.Choice(["start", "trace"]),
    default="start",
    show_default=True,
    help="All requests wait at the start, or each comes at its time.",
)
@click.option(
    "--hardware",
    default="a100-80",
    show_default=True,
    help="Profile that says how long a step takes: a name, or a TOML file.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Requests of the trace at most.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="Replay the trace N times.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of a generator.")
@click.option(
    "--requests-out", type=click.Path(dir_okay=False, path_type=Path), help="JSON line per request."
)
@json_option
@debug_option
@click.pass_obj
def replay(
    session: Session,
    trace: str,
    model: str,
    kv_memory_bytes: int | None,
    dtype: str,
    manager: Manager,
    arrivals: Literal["start", "trace"],
    hardware: str,
    limit: int | None,
    repeat: int,
    seed: int,
    requests_out: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace on the engine's own scheduler and memory core; no model is loaded."""
    from kvell.models.description import describe
    from kvell.simulator.model_cost import model_cost
    from kvell.simulator.profiles import load_profile
    from kvell.simulator.replay import Replay
    from kvell.simulator.runner import Machine
    from kvell.simulator.trace import repeated

    profile = load_profile(hardware)
    rows = repeated(load_rows(trace, limit, seed), repeat)
    config = load_config(named_config(model), session)
    description = describe(config, ELEMENT_BYTES[dtype])
    pool_bytes = kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    layout = plan_layout(description.layers, pool_bytes, manager=manager)
    machine = Machine(profile, model_cost(config, description, ELEMENT_BYTES[dtype]))
    limits = replay_limits(layout, description.max_model_len)
    core = create_core(layout)
    run = Replay(core, description.layers, limits, rows, arrivals, machine, MonotonicClock())
    with progress_bar("replaying") as progress:
        run.run(lambda fraction: progress("replaying", fraction))
    if requests_out is not None:
        write_lines(requests_out, [asdict(figures) for figures in run.requests])
    report = {"model": model, "trace": trace, "manager": manager, **run.report()}
    if as_json:
        click.echo(json.dumps(report))
    else:
        print_report(report)


def load_rows(trace: str, limit: int | None, seed: int) -> Any:
    """The rows of a trace file, or of the generator of that name."""
    from kvell.simulator.generators import generate_trace
    from kvell.simulator.trace import read_trace

    path = Path(trace).expanduser()
    return read_trace(path, limit) if path.is_file() else generate_trace(trace, limit, seed)


def named_config(model: str) -> str:
    """The path of a config in ``bench/configs``, here or in the repository; else ``model``."""
    for place in (Path(), REPOSITORY):
        path = place / CONFIGS / f"{model}.json"
        if path.is_file() and not Path(model).exists():
            return str(path)
    return model


def replay_limits(layout: Layout, own_model_len: int) -> Any:
    """The limits of a replay: requests as long as model and pool allow.

    :raises ChangeSomething: if the pool holds no request at all.
    """
    from kvell.engine.limits import Limits
    from kvell.simulator.replay import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

    chunk_tokens = Limits().min_chunk_tokens
    longest = longest_request(layout, own_model_len, chunk_tokens)
    if longest < MIN_MODEL_LEN:
        raise ChangeSomething(
            "--kv-memory", f"{layout.pool_bytes}B", "holds no request of this model", "use more"
        )
    return Limits(MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, longest)


def write_lines(path: Path, objects: list[dict[str, Any]]) -> None:
    """Write objects as JSON lines.

    :raises ChangeSomething: if the file cannot be written.
    """
    try:
        path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise ChangeSomething("--requests-out", path, problem, "give another path") from error
