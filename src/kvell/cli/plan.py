"""``kvell plan``: what fits, per layer group, for a config and a memory size."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from kvell.cli.options import (
    debug_option,
    dtype_option,
    json_option,
    kv_cache_dtype_option,
    kv_memory_option,
    manager_option,
    model_option,
)
from kvell.cli.plan_report import (
    PlanReport,
    fit_table,
    group_table,
    make_report,
    summary_lines,
)
from kvell.cli.progress import progress_bar
from kvell.cli.session import Session
from kvell.device.available import default_kv_memory_bytes
from kvell.errors import ChangeSomething
from kvell.models.kv_dtypes import KV_DTYPES, kv_dtype_named
from kvell.pages.sizing import Manager, plan_layout

WIDE_COLUMNS = 120
"""Width of tables where there is no terminal to ask."""
ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one stored number by ``--dtype``."""


@click.command()
@model_option
@kv_memory_option
@dtype_option
@kv_cache_dtype_option
@manager_option
@json_option
@debug_option
@click.pass_obj
def plan(
    session: Session,
    model: str,
    kv_memory_bytes: int | None,
    dtype: str,
    kv_cache_dtype: str,
    manager: Manager,
    as_json: bool,
) -> None:
    """Show what fits; --model may also be a config.json. Loads no weights."""
    from kvell.models.description import describe

    pool_bytes = kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    config = load_config(model, session)
    stored = KV_DTYPES[kv_dtype_named(kv_cache_dtype, dtype)]
    description = describe(config, stored.element_bytes, stored.scale_bytes, ELEMENT_BYTES[dtype])
    layout = plan_layout(description.layers, pool_bytes, manager=manager)
    report = make_report(
        model, description.architecture, manager, layout, description.max_model_len
    )
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _print(report)


def load_config(model: str, session: Session) -> Any:
    """The transformers config of whatever ``--model`` names, without its weights.

    :raises ChangeSomething: if there is none.
    """
    with progress_bar("reading the config") as report:
        from kvell.models.configs import read_config
        from kvell.models.source import resolve_model

        path = Path(model).expanduser()
        if not path.is_file():
            path = resolve_model(model, session.cache_dir, report, fetch_config)
        return read_config(path)


def fetch_config(model: str) -> Path:
    """The ``config.json`` of a hub model, downloaded or from the hub's cache.

    :raises ChangeSomething: if it cannot be had.
    """
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
        problem = "is no local model, and the hub did not give its config.json"
        remedy = "use smollm2, a transformers directory, or a config.json"
        raise ChangeSomething("model", model, problem, remedy) from error


def _print(report: PlanReport) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE_COLUMNS)
    for line in summary_lines(report):
        click.echo(line)
    console.print(group_table(report))
    console.print(fit_table(report))
