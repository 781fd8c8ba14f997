"""The session of a command: its model loader, clock and program name."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from kvell.cli.terminal.faults import Debug
from kvell.clock import Clock, MonotonicClock
from kvell.models.sources.progress import Progress

if TYPE_CHECKING:
    from kvell.engine.setup.engine_settings import EngineSettings
    from kvell.mempool.rendezvous import Rendezvous


API_KEY_VARIABLE = "KVELL_API_KEY"


class Contract(Protocol):
    """The memory contract: the use of all memory, stated before the run."""

    def lines(self) -> list[str]:
        """Return the contract as lines of text."""
        ...


class Tokenizer(Protocol):
    """The tokenizer of a model."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        ...

    def encode(self, text: str) -> Any:
        """Return the token ids of plain text, int32 ``[n]``."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> Any:
        """Return the token ids of a conversation up to the start of the answer, int32 ``[n]``."""
        ...


class Model(Protocol):
    """The part of :class:`kvell.llm.LLM` that commands use."""

    @property
    def contract(self) -> Contract:
        """The memory contract of the model."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        ...

    def generate(self, prompts: Any, sampling: Any, sequential: bool = False) -> Sequence[Any]:
        """Return request outputs in the order of the prompts."""
        ...

    def stream(self, prompt: Any, sampling: Any) -> Generator[str, None, str]:
        """Yield pieces of text as they are generated; return the reason of the end."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return the figures of the last ``generate``."""
        ...


def open_model(
    settings: "EngineSettings",
    cache_dir: Path,
    progress: Progress,
    incarnation: int = 0,
    weights_fd: int | None = None,
    pool_place: "Rendezvous | None" = None,
) -> Model:
    """Load the model and its engine into this process; imports torch."""
    from kvell.llm import LLM

    return LLM(
        replace(settings, pool_place=pool_place),
        cache_dir=cache_dir,
        progress=progress,
        incarnation=incarnation,
        weights_fd=weights_fd,
    )


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


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--debug``, which takes effect immediately and is not passed to the command."""

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


def api_key_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return ``--api-key`` of a client of a server; ``KVELL_API_KEY`` is its default."""

    def key(ctx: click.Context, _: click.Parameter, given: str | None) -> str | None:
        return given or ctx.ensure_object(Session).environ.get(API_KEY_VARIABLE)

    return click.option(
        "--api-key", callback=key, help=f"{text}  [default: the variable {API_KEY_VARIABLE}]"
    )
