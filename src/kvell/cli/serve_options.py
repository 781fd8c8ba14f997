"""Flags of ``kvell serve``: who may ask, connections, what is logged, how answers are read."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from kvell.engine.sampling.model_defaults import GenerationConfig
from kvell.models.text.content_format import ContentFormat
from kvell.server.access.key_file import MAX_IN_FLIGHT
from kvell.server.api.door.face_options import (
    ANY,
    CrossOrigin,
    FaceOptions,
    checked_origins,
    checked_root_path,
    listed,
)
from kvell.server.api.door.http_bounds import KEEP_ALIVE_SECONDS, MAX_CONNECTIONS

Command = Callable[..., Any]
Option = Callable[[Command], Command]
CROSS_ORIGIN = (
    ("headers", "Headers that pages of other origins may send. [default: any]"),
    ("methods", "Methods that pages of other origins may use. [default: any]"),
)
ACCESS = ("api_key", "api_key_file", "guard_metrics", "max_in_flight_per_key")


def _gathered(command: Command, into: str, names: Sequence[str], *options: Option) -> Command:
    """A command with further flags, which reach it together as one mapping."""

    @functools.wraps(command)
    def gathered(*args: object, **given: object) -> object:
        together = {name: given.pop(name) for name in names}
        return command(*args, **{into: together}, **given)

    with_flags: Command = gathered
    for option in options:
        with_flags = option(with_flags)
    return with_flags


def access_options(command: Command) -> Command:
    """Flags of keys, and of what each may have at once; the command gets ``access``."""

    return _gathered(
        command,
        "access",
        ACCESS,
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
    )


def template_options(command: Command) -> Command:
    """How prompts are made, and sampled if nothing is said; the command gets ``templates``."""
    return _gathered(
        command,
        "templates",
        ("chat_template", "chat_template_content_format", "generation_config"),
        click.option(
            "--generation-config",
            type=click.Choice(get_args(GenerationConfig)),
            default="auto",
            show_default=True,
            help="Sampling where a request does not say: as the models' generation_config.json"
            " recommends, or vLLM's neutral defaults.",
        ),
        click.option(
            "--chat-template-content-format",
            type=click.Choice(get_args(ContentFormat)),
            default="auto",
            show_default=True,
            help="What that template gets as content: texts, parts (openai), or what it reads.",
        ),
        click.option(
            "--chat-template",
            metavar="FILE|TEXT",
            help="The first model's chat template, in place of its own.",
        ),
    )


def log_options(command: Command) -> Command:
    """``--log-format``, and what the server tells of itself; the command gets that as ``told``."""
    return _gathered(
        command,
        "told",
        ("log_requests", "stats_seconds", "otlp_traces_endpoint"),
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
    )


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
    """``--tool-call-parser``, ``--reasoning-parser``; the command gets ``answers``."""
    return _gathered(
        command,
        "answers",
        ("tool_call_parser", "reasoning_parser"),
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
    )


def face_options(command: Command) -> Command:
    """Names of the first model, and what browsers and proxies need; the command gets ``face``."""

    @functools.wraps(command)
    def checked(*args: object, given: Mapping[str, Any], **more: object) -> object:
        cross_origin = CrossOrigin(
            checked_origins(given["allowed_origins"]),
            listed("allowed_methods", given["allowed_methods"]),
            listed("allowed_headers", given["allowed_headers"]),
            given["allow_credentials"],
        )
        face = FaceOptions(
            listed("served_model_name", given["served_model_name"]),
            checked_root_path(given["root_path"]),
            cross_origin,
            given["enable_tokenizer_info_endpoint"],
        )
        return command(*args, face=face, **more)

    return _gathered(
        checked,
        "given",
        (
            *("allowed_origins", "allowed_methods", "allowed_headers", "allow_credentials"),
            *("served_model_name", "root_path", "enable_tokenizer_info_endpoint"),
        ),
        click.option(
            "--enable-tokenizer-info-endpoint",
            is_flag=True,
            help="Show the tokenizer's settings and the chat template at /tokenizer_info.",
        ),
        click.option(
            "--allow-credentials",
            is_flag=True,
            help="Let browsers send cookies and the like from other origins.",
        ),
        *(_several(f"--allowed-{what}", [ANY], text) for what, text in CROSS_ORIGIN),
        _several(
            "--allowed-origins",
            [],
            "Pages of these origins may ask, such as https://chat.example (* is any); give it"
            " several times, or a JSON list. [default: none]",
        ),
        click.option(
            "--root-path",
            metavar="PATH",
            default="",
            help="Path under which a proxy has this server, such as /llm. [default: none]",
        ),
        _several(
            "--served-model-name",
            [],
            "Name of the first model in requests; give it several times for several."
            " [default: as --model says]",
        ),
    )


def _several(flag: str, default: Sequence[str], text: str) -> Option:
    return click.option(flag, multiple=True, default=default, metavar="VALUE", help=text)
