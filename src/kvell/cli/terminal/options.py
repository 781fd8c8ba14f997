"""Flags that several commands share, named as in vLLM."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import click

from kvell.cli.terminal.session import Session
from kvell.cli.terminal.sizes import SIZE
from kvell.device.available import default_kv_memory_bytes
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.models.config.kv_dtypes import KV_DTYPES
from kvell.models.config.quantization import QUANTIZATIONS
from kvell.pages.sizing import MANAGERS

Command = Callable[..., Any]


class LengthType(click.ParamType[int | None]):
    """A number of tokens, or ``auto`` (None)."""

    name = "n|auto"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Return a whole number of at least 1, or None for ``auto``."""
        if value is None or value == "auto":
            return None
        if str(value).isdecimal() and int(str(value)) > 0:
            return int(str(value))
        return self.fail(f"{value!r} is neither a whole number above 0 nor 'auto'.", param, ctx)


def chunked_prefill_option(command: Command) -> Command:
    """``--enable-chunked-prefill``, and its opposite."""
    text = "Cut prompts into chunks, computed beside decodes; else decodes wait for whole prompts."
    return click.option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        default=True,
        show_default=True,
        help=text,
    )(command)


def models_option(command: Command) -> Command:
    """``--model``, repeated for several models; the command gets them as ``models``."""
    text = "smollm2, a transformers directory, or a hub id; NAME=… names it. May be repeated."
    option = click.option(
        "--model",
        "models",
        multiple=True,
        metavar="[NAME=]MODEL",
        default=("smollm2",),
        show_default="smollm2",
        help=text,
    )
    return option(command)


def kv_memory_option(command: Command) -> Command:
    """``--kv-memory``."""
    text = "Memory of the KV pool, like 512MiB or 24GB. [default: a quarter of what is free]"
    return click.option("--kv-memory", "kv_memory_bytes", type=SIZE, help=text)(command)


def memory_option(command: Command) -> Command:
    """``--memory``."""
    text = "Memory of weights, KV cache and activations together; the last two share what is left."
    return click.option("--memory", "memory_bytes", type=SIZE, help=text)(command)


def cpu_buffer_option(command: Command) -> Command:
    """``--cpu-buffer``."""
    text = "Host memory for pages of preempted requests, which resume later. [default: none]"
    return click.option("--cpu-buffer", "cpu_buffer_bytes", type=SIZE, help=text)(command)


def objective_option(flag: str, text: str) -> Callable[[Command], Command]:
    """``--slo-ttft`` or ``--slo-tpot``; the command gets seconds, or None."""
    name = f"{flag.removeprefix('--').replace('-', '_')}_seconds"
    seconds = click.FloatRange(min=0, min_open=True)
    return click.option(flag, name, type=seconds, metavar="SECONDS", help=text)


def dtype_option(command: Command) -> Command:
    """``--dtype``."""
    choices = click.Choice(["auto", "float32", "bfloat16"])
    text = "Dtype of weights, and of KV unless given; auto is bfloat16."
    return click.option("--dtype", type=choices, default="auto", show_default=True, help=text)(
        command
    )


def kv_cache_dtype_option(command: Command) -> Command:
    """``--kv-cache-dtype``."""
    choices = click.Choice(["auto", *KV_DTYPES])
    text = "Dtype of KV; auto is --dtype, fp8 and int8 have a scale per token and head."
    return click.option(
        "--kv-cache-dtype", type=choices, default="auto", show_default=True, help=text
    )(command)


def quantization_option(command: Command) -> Command:
    """``--quantization``."""
    text = "Storage of weights; int4 blocks in a model's files are served as they are."
    return click.option(
        "--quantization",
        type=click.Choice(QUANTIZATIONS),
        default="none",
        show_default=True,
        help=text,
    )(command)


def manager_option(command: Command) -> Command:
    """``--manager``."""
    choices = click.Choice(MANAGERS)
    text = "How KV memory is divided; all but kvell are for comparison."
    return click.option("--manager", type=choices, default="kvell", show_default=True, help=text)(
        command
    )


def debug_option(command: Command) -> Command:
    """``--debug``: takes effect at once and is not passed on."""

    def switch(ctx: click.Context, _: click.Parameter, on: bool) -> None:
        ctx.find_object(Session).debug.on |= on  # type: ignore[union-attr]

    option = click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch,
        help="Show tracebacks.",
    )
    return option(command)


def json_option(command: Command) -> Command:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")(command)


def engine_options(command: Command) -> Command:
    """Add the flags of :class:`EngineSettings`; the command gets them as ``settings``."""

    @functools.wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        model, *beside = given.pop("models")
        given |= {"model": model, "beside": tuple(beside)}
        names = [field.name for field in fields(EngineSettings) if field.name in given]
        chosen = {name: given.pop(name) for name in names}
        return command(*args, settings=EngineSettings(**chosen), **given)

    return _with(_ENGINE_OPTIONS, gathered)


def _with(options: Sequence[Callable[[Command], Command]], command: Command) -> Command:
    """Add options to the command; help shows them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def _number(flag: str, default: int, text: str) -> Callable[[Command], Command]:
    at_least_one = click.IntRange(min=1)
    return click.option(
        flag, type=at_least_one, metavar="N", default=default, show_default=True, help=text
    )


_ENGINE_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    models_option,
    memory_option,
    kv_memory_option,
    cpu_buffer_option,
    objective_option(
        "--slo-ttft",
        "Time limit to a first token: while these are late, prompts go ahead of decodes, whose "
        "pages wait in the CPU buffer.",
    ),
    objective_option(
        "--slo-tpot", "Time limit per further token: while it is missed, prompts do not go ahead."
    ),
    dtype_option,
    kv_cache_dtype_option,
    quantization_option,
    click.option(
        "--kv-budget",
        metavar="N|pyramid:N",
        help="Tokens of a long prompt that a layer of full attention keeps, or keeps on average.",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help="Where the model runs.",
    ),
    click.option(
        "--max-model-len",
        type=LengthType(),
        default="auto",
        show_default=True,
        help="Prompt and output tokens of one request at most.",
    ),
    _number("--max-num-batched-tokens", 2048, "Tokens of one step at most."),
    _number("--max-num-seqs", 256, "Requests that run at once at most."),
    chunked_prefill_option,
    click.option(
        "--num-speculative-tokens",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Draft tokens of a request per step, at most; answers stay the same.",
    ),
    click.option(
        "--speculative-model",
        metavar="MODEL",
        help="A smaller model that makes draft tokens. [default: look up what the text repeats]",
    ),
    _number("--prompt-lookup-max", 5, "Longest end of the text to look up for draft tokens."),
    _number("--prompt-lookup-min", 2, "Shortest end of the text to look up."),
    click.option(
        "--async-scheduling/--no-async-scheduling",
        default=False,
        show_default=True,
        help="Plan a step while the one before runs, where the model allows it.",
    ),
    manager_option,
    debug_option,
)


def sampling_options(temperature: float, top_p: float) -> Callable[[Command], Command]:
    """Return flags for sampling, with the command's own defaults."""

    options = (
        _number("--max-tokens", 256, "Output tokens at most."),
        click.option(
            "--temperature",
            type=float,
            metavar="T",
            default=temperature,
            show_default=True,
            help="0 takes the likeliest token.",
        ),
        click.option(
            "--top-k",
            type=int,
            metavar="K",
            default=0,
            show_default=True,
            help="0 keeps all tokens.",
        ),
        click.option(
            "--top-p",
            type=float,
            metavar="P",
            default=top_p,
            show_default=True,
            help="1 keeps all tokens.",
        ),
        click.option("--seed", type=int, metavar="N", help="Draw the same tokens each time."),
    )
    return functools.partial(_with, options)


def require_one_model(settings: EngineSettings) -> None:
    """Check that one model is given, for commands that ask only one.

    :raises ChangeSomething: if several are given.
    """
    if settings.beside:
        problem = "is a second model, and only one is asked here"
        raise ChangeSomething("model", settings.beside[0], problem, "give --model once")


def with_kv_memory(settings: EngineSettings, session: Session) -> EngineSettings:
    """Return the settings; without a given size, a CPU machine gets the default KV pool."""
    given = settings.kv_memory_bytes is not None or settings.memory_bytes is not None
    if given or settings.device != "cpu":
        return settings
    share_bytes = session.available_bytes() // settings.memory_parts
    return replace(settings, kv_memory_bytes=default_kv_memory_bytes(share_bytes))


def with_shared_kv_memory(
    settings: EngineSettings, session: Session, instances: int
) -> EngineSettings:
    """Return the settings of each of several instances, which share the default KV memory.

    One instance decides by itself, when it starts.
    """
    given = settings.kv_memory_bytes is not None or settings.memory_bytes is not None
    if given or instances < 2 or settings.device != "cpu":
        return settings
    share_bytes = default_kv_memory_bytes(session.available_bytes() // instances)
    return replace(settings, kv_memory_bytes=share_bytes)
