"""Flags of several commands, named as in vLLM."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource
from typing_extensions import override

from kvell.byte_sizes import parse_bytes, parse_count
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.files import named_config
from kvell.cli.terminal.session import Session, debug_option
from kvell.device.available import default_kv_memory_bytes
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething
from kvell.flags import Flag, Kind, inner_record, settings_with_flag


class SizeType(click.ParamType[int]):
    """A click parameter that reads a size into bytes."""

    name = "size"

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        return parse_bytes(str(value), param.opts[0] if param else "size")


SIZE = SizeType()


class FiniteRange(click.FloatRange):
    """A range without ``inf`` and ``nan``, which pass click's bounds and are not JSON."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not finite.", param, ctx)
        return number


POSITIVE = FiniteRange(min=0, min_open=True)


Command = Callable[..., Any]
DEFAULT_MODEL = "smollm2"
MODELS = "[[NAME=]MODEL]..."
Option = Callable[[Command], Command]


class LengthType(click.ParamType[int | None]):
    """A number of tokens, or ``auto`` (None)."""

    name = "n|auto"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        if value is None or str(value) in ("auto", "-1"):
            return None
        if count := parse_count(str(value)):
            return count
        return self.fail(f"{value!r} is neither a whole number above 0 nor 'auto'.", param, ctx)


class CountRange(click.IntRange):
    """A range of whole numbers, which may be written like ``8k``."""

    @override
    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        count = parse_count(value) if isinstance(value, str) else None
        number: int = super().convert(cast("int", value) if count is None else count, param, ctx)
        return number


models_option = click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]MODEL",
    help="smollm2, a transformers directory, a GGUF file, or a hub id; NAME=… names it. "
    "May be repeated."
    f"  [default: {DEFAULT_MODEL}]",
)
"""The option ``--model``; the command gets the models as ``models``."""


def models_argument(command: Command) -> Command:
    """Add ``--model``, and models without it; the command gets both as ``models``."""

    @functools.wraps(command)
    def with_models(
        *args: object, named: Sequence[str], models: Sequence[str], **given: Any
    ) -> Any:
        return command(*args, models=choose_models(named, models), **given)

    return click.argument("named", nargs=-1, metavar=MODELS)(models_option(with_models))


def choose_models(named: Sequence[str], models: Sequence[str]) -> tuple[str, ...]:
    """Return the models of a command, or the default.

    :param named: models without ``--model``.
    :param models: models with it; those of a file or variable count only if no other is given.
    """
    source = click.get_current_context().get_parameter_source("models")
    if named and source is not ParameterSource.COMMANDLINE:
        models = ()
    return (*named, *models) or (DEFAULT_MODEL,)


def setting_option(name: str) -> Option:
    """Return the flag of a setting of :class:`EngineSettings`; its parameter has the same name."""
    return next(
        _option_of(field, flag)
        for field, flag in settings_with_flag(EngineSettings)
        if field.name == name
    )


def record_options(record: type, into: str) -> Option:
    """Return the flags of a record of settings; a command gets the record as ``into``."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run_with_record(*args: object, **given: object) -> object:
            return command(*args, **{into: _take_record(record, given)}, **given)

        options = [_option_of(*each) for each in settings_with_flag(record)]
        return with_options(run_with_record, options)

    return add


def _take_record(record: type, given: dict[str, object]) -> object:
    """Return a record of values by the names of its fields; they are removed from ``given``."""
    values: dict[str, object] = {}
    for field in fields(record):
        flag = field.metadata.get("flag")
        inner = inner_record(field)
        if inner is not None:
            values[field.name] = _take_record(inner, given)
        elif (value := given.pop(field.name, None)) is not None:
            values[field.name] = flag.parse(value) if flag and flag.parse else value
    return record(**values)


def _option_of(field: Field[object], flag: Flag) -> Option:
    default = "auto" if flag.kind == "length" else flag.typed
    return click.option(
        *((f"{flag.name}/{flag.opposite}",) if flag.kind == "switch" else flag.names),
        field.name,
        type=click.Choice(flag.choices) if flag.choices else _type_of(flag),
        is_flag=flag.kind == "mark" or None,
        multiple=flag.kind == "list",
        required=flag.required,
        metavar=(_METAVARS.get(flag.kind) if flag.metavar is None else flag.metavar) or None,
        default=default,
        show_default=flag.kind != "list" and default not in (None, ""),
        help=flag.help,
    )


def _type_of(flag: Flag) -> click.ParamType[Any] | None:
    least, most = flag.least, flag.most
    match flag.kind:
        case "integer":
            bounds = (1 if least is None else int(least), None if most is None else int(most))
            return CountRange(*bounds)
        case "number":
            return FiniteRange(least, most)
        case "seconds":
            return FiniteRange(least or 0, most, min_open=least is None)
    return _TYPES.get(flag.kind)


config_option = click.option(
    "--config",
    metavar="FILE",
    expose_value=False,
    help="YAML file of flags, like port: 8000; the command line wins over it.",
)
"""The option ``--config``, which :class:`EngineCommand` reads."""


def engine_command(function: Callable[..., Any]) -> click.Command:
    argument = click.argument("named", nargs=-1, metavar=MODELS)
    return click.command(cls=EngineCommand)(argument(config_option(function)))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


def engine_options(command: Command) -> Command:
    """Add the flags of :class:`EngineSettings`; the command gets them as ``settings``.

    The settings include the command's own flags that have the name of a setting.
    """

    @functools.wraps(command)
    def gathered(*args: Any, **given: Any) -> Any:
        model, *beside = choose_models(given.pop("named", ()), given.pop("models"))
        _require_weights((model, *beside))
        given |= {"model": model, "beside": tuple(beside)}
        settings = _take_record(EngineSettings, given)
        return command(*args, settings=settings, **given)

    return with_options(gathered, _ENGINE_OPTIONS)


def _require_weights(models: Sequence[str]) -> None:
    """Refuse the short names of configs, which ``kvell plan`` and ``kvell replay`` take.

    :raises ChangeSomething: naming the model.
    """
    for model in models:
        if named_config(model) != model:
            remedy = "give a directory with weights, or use kvell plan or kvell replay"
            raise ChangeSomething("model", model, "names a config without weights", remedy)


def with_options(command: Command, options: Sequence[Option]) -> Command:
    """Add options to a command; help shows them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def _number(
    flag: str,
    default: float,
    text: str,
    kind: click.ParamType[Any] | type[float],
    metavar: str = "N",
) -> Option:
    return click.option(
        flag, type=kind, metavar=metavar, default=default, show_default=True, help=text
    )


_TYPES: Mapping[Kind, click.ParamType[Any]] = {
    "path": click.Path(path_type=Path),
    "file": click.Path(dir_okay=False, path_type=Path),
    "bytes": SIZE,
    "length": LengthType(),
    "switch": click.BOOL,
}
_METAVARS = {"list": "VALUE", "seconds": "SECONDS", "integer": "N"}
_ENGINE_OPTIONS: tuple[Option, ...] = (
    models_option,
    *(_option_of(field, flag) for field, flag in settings_with_flag(EngineSettings)),
    debug_option,
)


def sampling_options(temperature: float, top_p: float) -> Option:
    """Return flags for sampling, with the command's own defaults."""

    options = (
        _number("--max-tokens", 256, "Maximum output tokens.", click.IntRange(min=1)),
        _number("--temperature", temperature, "0 chooses the likeliest token.", float, "T"),
        _number("--top-k", 0, "0 keeps all tokens.", int, "K"),
        _number("--top-p", top_p, "1 keeps all tokens.", float, "P"),
        click.option(
            "--seed", type=int, metavar="N", help="Seed: sample the same tokens each time."
        ),
    )
    return functools.partial(with_options, options=options)


def require_one_model(settings: EngineSettings) -> None:
    """Check that only one model is given.

    :raises ChangeSomething: if several are given.
    """
    if settings.beside:
        problem = "is a second model, and only one is asked here"
        raise ChangeSomething("model", settings.beside[0], problem, "give --model once")


def with_kv_memory(settings: EngineSettings, session: Session) -> EngineSettings:
    if _has_memory(settings) or settings.device != "cpu":
        return settings
    share_bytes = session.available_bytes() // settings.memory_parts
    return replace(settings, kv_memory_bytes=default_kv_memory_bytes(share_bytes))


def with_shared_kv_memory(
    settings: EngineSettings, session: Session, instances: int
) -> EngineSettings:
    """Return the settings of each of several instances, which share the default KV memory.

    A single instance computes its default when it starts.
    """
    if _has_memory(settings) or instances < 2 or settings.device != "cpu":
        return settings
    share_bytes = default_kv_memory_bytes(session.available_bytes() // instances)
    return replace(settings, kv_memory_bytes=share_bytes)


def _has_memory(settings: EngineSettings) -> bool:
    given = settings.kv_memory_bytes, settings.memory_bytes, settings.gpu_memory_utilization
    return given != (None, None, None)
