"""The session of a command: its model loader, clock and program name."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.terminal.faults import Debug
from kvell.clock import Clock, MonotonicClock
from kvell.models.sources.progress import Progress

if TYPE_CHECKING:
    from kvell.engine.opened import Pricing
    from kvell.engine.setup.engine_settings import EngineSettings
    from kvell.llm import LLM
    from kvell.mempool.rendezvous import Rendezvous


API_KEY_VARIABLE = "KVELL_API_KEY"
START_OBJECTS = 100_000
"""New objects before a collection, at the start: with Python's 700, collections take a tenth of
the imports' time."""


def open_model(
    settings: "EngineSettings",
    cache_dir: Path,
    progress: Progress,
    incarnation: int = 0,
    weights_fd: int | None = None,
    pool_place: "Rendezvous | None" = None,
    pricing: "Pricing | None" = None,
    *,
    reads_text: bool = False,
) -> "LLM":
    """Load the model and its engine into this process; imports torch.

    :param reads_text: load the tokenizer, too.
    """
    collect_as_usual = collect_rarely()
    try:
        from kvell.llm import LLM

        model = LLM(
            replace(settings, pool_place=pool_place),
            cache_dir=cache_dir,
            progress=progress,
            incarnation=incarnation,
            weights_fd=weights_fd,
            pricing=pricing,
            reads_text=reads_text,
        )
        if reads_text:
            _ = model.tokenizer  # its imports are part of the start
    finally:
        collect_as_usual()
    return model


def collect_rarely() -> Callable[[], None]:
    """Make collections of garbage rare during a start; return what ends this."""
    usual = gc.get_threshold()
    gc.set_threshold(START_OBJECTS)
    return lambda: gc.set_threshold(*usual)


@dataclass(frozen=True)
class Session:
    """One run of the command line; tests supply their own parts.

    :ivar environ: variables whose names begin with ``KVELL_``.
    :ivar notes: lines for the user about flags without effect, until they are printed.
    """

    cache_dir: Path
    program: str = "kvell"
    available_bytes: Callable[[], int] = lambda: 0
    open_model: Callable[..., Any] = open_model
    clock: Clock = field(default_factory=MonotonicClock)
    debug: Debug = field(default_factory=Debug)
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _switch_debug(ctx: click.Context, _: click.Parameter, on: bool) -> None:
    ctx.find_object(Session).debug.on |= on  # type: ignore[union-attr]


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_switch_debug,
    help="Show tracebacks.",
)
"""The option ``--debug``, which takes effect immediately and is not passed to the command."""


def api_key_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``--api-key`` of a client of a server; ``KVELL_API_KEY`` is its default."""

    def key(ctx: click.Context, _: click.Parameter, given: str | None) -> str | None:
        return given or ctx.ensure_object(Session).environ.get(API_KEY_VARIABLE)

    return click.option(
        "--api-key", callback=key, help=f"{text}  [default: the variable {API_KEY_VARIABLE}]"
    )
