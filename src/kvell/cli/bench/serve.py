"""``kvell bench serve``: load of any server with OpenAI's API."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from kvell.cli.bench.workload_options import (
    Source,
    check_results,
    give_results,
    results_option,
    vocab_size_option,
)
from kvell.cli.terminal.figures import print_load
from kvell.cli.terminal.files import require_directory, writing
from kvell.cli.terminal.options import POSITIVE, FiniteRange, record_options
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session, api_key_option, debug_option
from kvell.device.open_files import allow_open_files
from kvell.errors import ChangeSomething
from kvell.wire.decoding import MalformedError, decode_json

PromptFormat = Literal["auto", "ids", "text"]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Flags:
    """The flags that determine how requests are sent."""

    base_url: str
    model: str
    endpoint: Literal["completions", "chat"]
    rate: float | None
    time_scale: float
    think_time: float | None
    disconnect_share: float
    prompt_format: PromptFormat
    vocab_size: int
    tokenizer: str | None
    return_token_ids: bool
    ignore_eos: bool
    extra_body: str | None
    api_key: str | None
    timeout: float
    slo_ttft: float | None
    slo_tpot: float | None


def made_prompts(
    session: Session, flags: Flags, rows: Sequence[Any], seed: int, progress: Any
) -> Any:
    from kvell.load.prompts import chat_prompts, id_prompts, text_prompts

    if flags.endpoint == "chat":
        return chat_prompts(rows, seed)
    knows_ids = flags.return_token_ids or flags.tokenizer is not None
    goes_on = any(row.continues for row in rows)
    if flags.prompt_format == "text" or (
        flags.prompt_format == "auto" and goes_on and not knows_ids
    ):
        return text_prompts(rows, seed)
    if goes_on and not knows_ids:
        problem = "needs the ids of answers, which next turns begin with"
        remedy = "add --tokenizer or --return-token-ids, or use text"
        raise ChangeSomething("--prompt-format", "ids", problem, remedy)
    return id_prompts(rows, seed, flags.vocab_size, _encoder(session, flags, progress))


def _encoder(session: Session, flags: Flags, progress: Any) -> Encode:
    """Return a function from an answer's text to ids, without special tokens."""
    if flags.tokenizer is None:
        return lambda _text: []
    from kvell.models.sources.source import resolve_model
    from kvell.models.text.tokenizer import Tokenizer

    path = resolve_model(flags.tokenizer, session.cache_dir, progress)
    backend = Tokenizer.load(path).backend
    return lambda text: list(backend(text, add_special_tokens=False)["input_ids"])


def extra_fields(flags: Flags) -> dict[str, Any]:
    """Return the extra fields that the flags add to every request.

    :raises ChangeSomething: if ``--extra-body`` is not a JSON object.
    """
    try:
        fields = decode_json(flags.extra_body or "{}")
    except MalformedError:
        fields = None
    if not isinstance(fields, dict):
        remedy = """write it like '{"top_k": 1}'"""
        raise ChangeSomething("--extra-body", flags.extra_body, "is not a JSON object", remedy)
    return fields | ({"return_token_ids": True} if flags.return_token_ids else {})


RATE = click.FloatRange(min=0, min_open=True)
"""The type of a rate; ``inf`` sends all requests together."""


@click.command()
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option(
    "--model",
    default="",
    metavar="NAME",
    help="The model to ask.  [default: the only one it serves]",
)
@record_options(Source, "source")
@click.option("--rate", type=RATE, metavar="R", help="Requests per second, Poisson; or inf.")
@click.option(
    "--time-scale", type=POSITIVE, default=1.0, help="Factor by which a trace's times grow."
)
@click.option(
    "--think-time",
    type=FiniteRange(min=0),
    metavar="SECONDS",
    help="Mean pause after an answer.  [default: as long after the last turn as in the trace]",
)
@click.option(
    "--disconnect-share",
    type=FiniteRange(0, 1),
    default=0.0,
    metavar="P",
    help="Fraction of the clients that disconnect midway.",
)
@click.option("--slo-ttft", type=POSITIVE, metavar="SECONDS", help="Time limit to the first token.")
@click.option("--slo-tpot", type=POSITIVE, metavar="SECONDS", help="Time limit per further token.")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="Endpoint of OpenAI's API; chat adds the tokens of the model's template.",
)
@click.option(
    "--prompt-format",
    type=click.Choice(["auto", "ids", "text"]),
    default="auto",
    help="Token ids are exact; auto sends words where answers must be sent back as ids.",
)
@vocab_size_option
@click.option(
    "--tokenizer", metavar="MODEL", help="Tokenizer that turns answers into ids for next turns."
)
@click.option("--return-token-ids", is_flag=True, help="Ask the server for token ids (vLLM).")
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Answers of exact length.")
@click.option("--extra-body", metavar="JSON", help="Further fields of every request.")
@api_key_option("Sent as a bearer token.")
@click.option(
    "--timeout",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for a whole answer.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A picture: .png, .svg or .html.",
)
@results_option
@debug_option
@click.pass_obj
def serve(
    session: Session,
    /,
    source: Source,
    plot_path: Path | None,
    json_path: str | None,
    **given: Any,
) -> None:
    """Send requests on schedule, whatever the server does, and measure what clients see.

    Times to the first token, per token and end to end, with percentiles; goodput is complete
    requests per second that met --slo-ttft and --slo-tpot. All times are in seconds.
    """
    from kvell.load.report import Objectives, summary

    flags = Flags(**given)
    check_results(json_path)
    if plot_path is not None:
        from kvell.simulator.report.pictures import check_picture

        check_picture("--plot", plot_path, "load")
        require_directory("--plot", plot_path)
    allow_open_files()  # each open request needs one
    with progress_bar("making requests") as progress:
        measured = _measured(session, source, flags, progress)
    objectives = Objectives(flags.slo_ttft, flags.slo_tpot)
    report = {
        "model": measured.model,
        "base_url": flags.base_url,
        "endpoint": flags.endpoint,
        "workload": source.name,
        "rate": "inf" if flags.rate == math.inf else flags.rate,
        "seed": source.seed,
        **summary(measured.outcomes, objectives),
        "server": measured.server,
    }
    title = f"{measured.model}, {source.name}"
    if plot_path is not None:
        from kvell.load.plot import draw_load

        with writing("--plot", plot_path):
            draw_load(plot_path, title, measured.outcomes, objectives, report)
    give_results(report, json_path, lambda: print_load(title, report))


def _measured(session: Session, source: Source, flags: Flags, progress: Any) -> Any:
    from kvell.load.arrivals import hang_ups, retime, think_times
    from kvell.load.driver import Load, measure
    from kvell.load.http.client import HttpClient
    from kvell.load.http.wire import Wire

    rows = retime(source.rows(), rate=flags.rate, time_scale=flags.time_scale, seed=source.seed)
    thinks = None
    if flags.think_time is not None:
        thinks = think_times(len(rows), flags.think_time, source.seed)
    leaving = hang_ups(rows, flags.disconnect_share, source.seed)
    load = Load(rows, leaving, thinks, flags.timeout)
    wire = Wire(flags.model, flags.endpoint, flags.ignore_eos, extra_fields(flags))
    prompts = made_prompts(session, flags, rows, source.seed, progress)

    async def run() -> Any:
        client = HttpClient(flags.base_url, flags.api_key)
        try:
            show_progress = lambda ended, of: progress("driving", ended / of)  # noqa: E731
            return await measure(client, flags.base_url, wire, prompts, load, show_progress)
        finally:
            client.close()

    return asyncio.run(run())
