"""Flags of ``kvell serve``: access, connections, logs, formats of answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click

from kvell.cli.terminal.options import Command, Option, gathering, with_options
from kvell.engine.protocol.sampling_params import MAX_SEED
from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.models.text.content_format import ContentFormat
from kvell.server.access.key_file import MAX_IN_FLIGHT
from kvell.server.api.door.face_options import (
    ANY,
    CrossOrigin,
    FaceOptions,
    checked_origins,
    checked_root_path,
    parse_list,
)
from kvell.server.api.door.http_bounds import KEEP_ALIVE_SECONDS, MAX_CONNECTIONS

CROSS_ORIGIN = (
    ("methods", "Methods that pages of other origins may use. [default: any]"),
    ("headers", "Headers that pages of other origins may send. [default: any]"),
)
ACCESS = ("api_key", "api_key_file", "guard_metrics", "max_in_flight_per_key")


def access_options(command: Command) -> Command:
    """Add the flags of API keys and their limits; the command gets ``access``."""

    return gathering(
        command,
        "access",
        dict,
        (
            click.option("--api-key", help="Clients must send it; without a key, all are served."),
            click.option(
                "--api-key-file",
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Keys of several tenants, with limits; read again at SIGHUP.",
            ),
            click.option(
                "--max-in-flight-per-key",
                type=click.IntRange(min=1),
                metavar="SEQUENCES",
                default=MAX_IN_FLIGHT,
                show_default=True,
                help="Maximum number of waiting and running answers of each key in --api-key-file.",
            ),
            click.option(
                "--guard-metrics", is_flag=True, help="Require an operator's key for /metrics, too."
            ),
        ),
        ACCESS,
    )


def template_options(command: Command) -> Command:
    """Add the flags of chat templates and default sampling; the command gets ``templates``."""
    return gathering(
        command,
        "templates",
        dict,
        (
            click.option(
                "--chat-template",
                metavar="FILE|TEXT",
                help="The first model's chat template, in place of its own.",
            ),
            click.option(
                "--chat-template-content-format",
                type=click.Choice(get_args(ContentFormat)),
                default="auto",
                show_default=True,
                help="What the template gets as content: texts, parts (openai), or as it reads it.",
            ),
            click.option(
                "--generation-config",
                type=click.Choice(get_args(GenerationConfig)),
                default="auto",
                show_default=True,
                help="Sampling where a request does not say: as the models' generation_config.json"
                " recommends, or vLLM's neutral defaults.",
            ),
        ),
        ("chat_template", "chat_template_content_format", "generation_config"),
    )


def log_options(command: Command) -> Command:
    """Add ``--log-format``, and flags of logs, statistics and traces as the command's ``logs``."""
    return gathering(
        command,
        "logs",
        dict,
        (
            click.option(
                "--log-format",
                type=click.Choice(["text", "json"]),
                default="text",
                show_default=True,
                help="Form of the log's lines on stderr.",
            ),
            click.option("--log-requests", is_flag=True, help="Log each request when it ends."),
            click.option(
                "--stats-seconds",
                type=click.FloatRange(min=0),
                metavar="SECONDS",
                default=10.0,
                show_default=True,
                help="Time between lines of statistics while there is traffic; 0 for none.",
            ),
            click.option(
                "--otlp-traces-endpoint",
                metavar="URL",
                help="Send a trace of each request to this collector, by OTLP over HTTP.",
            ),
        ),
        ("log_requests", "stats_seconds", "otlp_traces_endpoint"),
    )


def connection_options(command: Command) -> Command:
    """Add ``--max-connections`` and ``--keep-alive-seconds``."""
    options = (
        click.option(
            "--max-connections",
            type=click.IntRange(min=16),
            default=MAX_CONNECTIONS,
            show_default=True,
            help="Maximum number of open connections; beyond it, the longest idle one is closed.",
        ),
        click.option(
            "--keep-alive-seconds",
            type=click.IntRange(min=1),
            metavar="SECONDS",
            default=KEEP_ALIVE_SECONDS,
            show_default=True,
            help="Time limit between an answer and the connection's next request.",
        ),
    )
    return with_options(command, options)


def cluster_options(command: Command) -> Command:
    """Add ``--cluster`` and ``--cluster-name``."""
    options = (
        click.option(
            "--cluster",
            metavar="ADDRESS",
            help="Place the instances on the machines of a Ray cluster: ray://HOST:PORT, HOST:PORT,"
            " auto, or local-ray, which starts one here. [default: on this machine]",
        ),
        click.option(
            "--cluster-name",
            metavar="NAME",
            default="kvell",
            show_default=True,
            help="Servers of one name share their instances; the first starts them.",
        ),
    )
    return with_options(command, options)


def events_option(command: Command) -> Command:
    """Add ``--kv-events-config``."""
    return click.option(
        "--kv-events-config",
        metavar="JSON",
        help="Publish cached blocks for external routers, in vLLM's schema over ZeroMQ.",
    )(command)


def answer_options(command: Command) -> Command:
    """Add the flags of answers' formats, and ``--seed``; the command gets ``answers``."""
    return gathering(
        command,
        "answers",
        dict,
        (
            click.option(
                "--tool-call-parser",
                metavar="NAME",
                help="How the first model writes tool calls; by default as its template says.",
            ),
            click.option(
                "--reasoning-parser",
                metavar="NAME",
                help="How the first model writes its reasoning; by default as its template says.",
            ),
            click.option(
                "--seed",
                type=click.IntRange(0, MAX_SEED),
                metavar="N",
                help="Seed of the requests that have none: the same requests in the same order"
                " sample with the same seeds. [default: random]",
            ),
        ),
        ("tool_call_parser", "reasoning_parser", "seed"),
    )


def face_options(command: Command) -> Command:
    """Add flags of served names, browsers and proxies; the command gets ``face``."""
    return gathering(
        command,
        "face",
        _face,
        (
            _several(
                "--served-model-name",
                [],
                "Name of the first model in requests; give it several times for several."
                " [default: as --model says]",
            ),
            click.option(
                "--root-path",
                metavar="PATH",
                default="",
                help="Path at which a proxy serves this server, such as /llm. [default: none]",
            ),
            _several(
                "--allowed-origins",
                [],
                "Web pages of these origins may send requests, such as https://chat.example "
                "(* is any); give it several times, or a JSON list. [default: none]",
            ),
            *(_several(f"--allowed-{what}", [ANY], text) for what, text in CROSS_ORIGIN),
            click.option(
                "--allow-credentials",
                is_flag=True,
                help="Let browsers send credentials from other origins.",
            ),
            click.option(
                "--enable-tokenizer-info-endpoint",
                is_flag=True,
                help="Show the tokenizer's settings and the chat template at /tokenizer_info.",
            ),
            click.option(
                "--disable-docs", is_flag=True, help="Serve neither /docs nor /openapi.json."
            ),
        ),
        (
            *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
            *("served_model_name", "root_path", "enable_tokenizer_info_endpoint", "disable_docs"),
        ),
    )


def _face(
    served_model_name: Sequence[str],
    root_path: str,
    enable_tokenizer_info_endpoint: bool,
    disable_docs: bool,
    allowed_origins: Sequence[str],
    allowed_methods: Sequence[str],
    allowed_headers: Sequence[str],
    allow_credentials: bool,
) -> FaceOptions:
    cross_origin = CrossOrigin(
        checked_origins(allowed_origins),
        parse_list("allowed_methods", allowed_methods),
        parse_list("allowed_headers", allowed_headers),
        allow_credentials,
    )
    return FaceOptions(
        parse_list("served_model_name", served_model_name),
        checked_root_path(root_path),
        cross_origin,
        enable_tokenizer_info_endpoint,
        disable_docs,
    )


def _several(flag: str, default: Sequence[str], text: str) -> Option:
    return click.option(flag, multiple=True, default=default, metavar="VALUE", help=text)
