"""Flags of ``kvell serve``: who may ask, connections, what is logged, how answers are read."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.server.access.key_file import MAX_IN_FLIGHT
from kvell.server.api.http_bounds import KEEP_ALIVE_SECONDS, MAX_CONNECTIONS

Command = Callable[..., Any]
ACCESS = ("api_key", "api_key_file", "guard_metrics", "max_in_flight_per_key")
ANSWERS = ("tool_call_parser", "reasoning_parser", "generation_config")


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are read, and sampled if nothing is said.

    :param tool_call_parser: how the first model writes calls; None: as its chat template says.
    :param reasoning_parser: how it writes its reasoning, likewise.
    :param generation_config: whether the models' recommended sampling is their default.
    """

    tool_call_parser: str | None
    reasoning_parser: str | None
    generation_config: GenerationConfig


def _gathering(
    command: Command, names: Sequence[str], gather: Callable[[dict[str, Any]], Mapping[str, object]]
) -> Command:
    """The command, which gets these flags as one argument."""

    @functools.wraps(command)
    def gathered(*args: Any, **given: Any) -> object:
        told = gather({name: given.pop(name) for name in names})
        return command(*args, **told, **given)

    return gathered


def access_options(command: Command) -> Command:
    """Flags of keys, and of what each may have at once; the command gets ``access``."""
    gathered = _gathering(command, ACCESS, lambda given: {"access": given})
    for option in (
        click.option(
            "--guard-metrics", is_flag=True, help="Ask for an operator's key at /metrics too."
        ),
        click.option(
            "--max-in-flight-per-key",
            type=click.IntRange(min=1),
            metavar="SEQUENCES",
            default=MAX_IN_FLIGHT,
            show_default=True,
            help="Answers that each key of --api-key-file may have waiting or running.",
        ),
        click.option(
            "--api-key-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Keys of several tenants, with limits; read again at SIGHUP.",
        ),
        click.option("--api-key", help="Clients must send it; without a key, all are served."),
    ):
        gathered = option(gathered)
    return gathered


def log_options(command: Command) -> Command:
    """``--log-format``, ``--log-requests``, ``--stats-seconds``, ``--otlp-traces-endpoint``."""
    for option in (
        click.option(
            "--otlp-traces-endpoint",
            metavar="URL",
            help="Send a trace of each request to this collector, by OTLP over HTTP.",
        ),
        click.option(
            "--stats-seconds",
            type=click.FloatRange(min=0),
            metavar="SECONDS",
            default=10.0,
            show_default=True,
            help="Between two lines of statistics while there is traffic; 0 for none.",
        ),
        click.option("--log-requests", is_flag=True, help="Log each request when it ends."),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Form of the log's lines on stderr.",
        ),
    ):
        command = option(command)
    return command


def connection_options(command: Command) -> Command:
    """``--max-connections``, ``--keep-alive-seconds``."""
    for option in (
        click.option(
            "--keep-alive-seconds",
            type=click.IntRange(min=1),
            metavar="SECONDS",
            default=KEEP_ALIVE_SECONDS,
            show_default=True,
            help="Between an answer and the next request of a connection.",
        ),
        click.option(
            "--max-connections",
            type=click.IntRange(min=16),
            default=MAX_CONNECTIONS,
            show_default=True,
            help="Open at once; beyond, the one that has waited longest for a request is closed.",
        ),
    ):
        command = option(command)
    return command


def cluster_options(command: Command) -> Command:
    """``--cluster``, ``--cluster-name``."""
    for option in (
        click.option(
            "--cluster-name",
            metavar="NAME",
            default="kvell",
            show_default=True,
            help="Servers of one name share their instances; the first starts them.",
        ),
        click.option(
            "--cluster",
            metavar="ADDRESS",
            help="Place the instances on the machines of a Ray cluster: ray://HOST:PORT, HOST:PORT,"
            " auto, or local-ray, which starts one here. [default: on this machine]",
        ),
    ):
        command = option(command)
    return command


def events_option(command: Command) -> Command:
    """``--kv-events-config``."""
    return click.option(
        "--kv-events-config",
        metavar="JSON",
        help="Publish what is cached, for routers outside, in vLLM's schema and over ZeroMQ.",
    )(command)


def answer_options(command: Command) -> Command:
    """Flags of how answers are read, and of usual sampling; the command gets ``answers``."""
    gathered = _gathering(command, ANSWERS, lambda given: {"answers": AnswerOptions(**given)})
    for option in (
        click.option(
            "--generation-config",
            type=click.Choice(get_args(GenerationConfig)),
            default="auto",
            show_default=True,
            help="Sampling where a request does not say: as the models' generation_config.json"
            " recommends, or vLLM's neutral defaults.",
        ),
        click.option(
            "--reasoning-parser",
            metavar="NAME",
            help="How the first model writes its reasoning; by default as its template says.",
        ),
        click.option(
            "--tool-call-parser",
            metavar="NAME",
            help="How the first model writes tool calls; by default as its template says.",
        ),
    ):
        gathered = option(gathered)
    return gathered
