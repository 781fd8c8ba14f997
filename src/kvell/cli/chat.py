"""``kvell chat``: a conversation, from a terminal or line by line from a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.terminal.faults import as_flags
from kvell.cli.terminal.options import (
    engine_command,
    engine_options,
    json_option,
    require_one_model,
    sampling_options,
    with_kv_memory,
)
from kvell.cli.terminal.progress import progress_bar
from kvell.cli.terminal.session import Session
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething

if TYPE_CHECKING:
    from kvell.llm import LLM

HELP = '/help shows commands, /bye ends, """ begins and ends several lines'
COMMANDS_HELP = """/help                show this
/bye, /quit          end
/reset, /clear       forget the conversation
/set NAME VALUE      change temperature, top_k, top_p, max_tokens, seed or
                     system (the system prompt)
/set                 show these settings
Ctrl-C               stop an answer
\"\"\"                  begin and end a turn of several lines"""
ENDS = frozenset({"/quit", "/exit", "/bye"})
FORGETS = frozenset({"/reset", "/clear"})
HELPS = frozenset({"/help", "/?"})
COMMANDS = FORGETS | HELPS | {"/set"}
QUOTES = '"""'
NUMBERS: Mapping[str, Callable[[str], float]] = MappingProxyType(
    {"temperature": float, "top_k": int, "top_p": float, "max_tokens": int, "seed": int}
)
"""Settings that ``/set`` changes, and their types."""


@dataclass
class Conversation:
    """The messages so far, which each turn sends again; the prefix cache makes that cheap."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})


@engine_command
@click.option("--system", help="System prompt.")
@sampling_options(temperature=0.7, top_p=0.95)
@json_option
@engine_options
@click.pass_obj
def chat(
    session: Session,
    /,
    settings: EngineSettings,
    system: str | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Talk with a model; each line of a pipe is a turn."""
    require_one_model(settings)
    drawn = SamplingParams(**sampling)
    with progress_bar("loading") as report:
        chosen = with_kv_memory(settings, session)
        model = session.open_model(chosen, session.cache_dir, report, reads_text=True)
    interactive = sys.stdin.isatty()
    if interactive:
        for line in [*model.contract.lines(), "", HELP]:
            click.echo(line, err=True)
    talk(model, Conversation(system), drawn, as_json=as_json, interactive=interactive)


def talk(
    model: "LLM",
    conversation: Conversation,
    sampling: SamplingParams,
    *,
    as_json: bool,
    interactive: bool,
) -> None:
    """Answer turns until ``/bye`` or the end of input.

    :raises ChangeSomething: if a turn cannot be answered and the input is not interactive.
    """
    for turn in read_turns(interactive):
        try:
            if is_command(turn, interactive=interactive):
                sampling = obey(turn, conversation, sampling)
                continue
            conversation.add("user", turn)
            try:
                answer = _take_turn(model, conversation, sampling, as_json=as_json)
            except ChangeSomething:
                conversation.turns.pop()
                raise
        except ChangeSomething as error:
            if not interactive:
                raise
            click.echo(f"kvell: {as_flags(error)} (or /reset)", err=True)
            continue
        conversation.add("assistant", answer)


def is_command(turn: str, *, interactive: bool) -> bool:
    """Return whether a turn is a command; at a terminal, also one that does not exist."""
    word = turn.split()[0]
    is_name = interactive and "\n" not in turn and word[0] == "/" and word[1:].isalpha()
    return word in COMMANDS or is_name


def obey(command: str, conversation: Conversation, sampling: SamplingParams) -> SamplingParams:
    """Run a command such as ``/set temperature 0``, and return the sampling of further turns.

    :raises ChangeSomething: if there is no such command, or a value cannot be used.
    """
    word, *rest = command.split(maxsplit=2)
    if word in FORGETS:
        conversation.turns.clear()
        return sampling
    if word in HELPS:
        click.echo(COMMANDS_HELP, err=True)
        return sampling
    if word != "/set":
        raise ChangeSomething("command", word, "is not a command", "type /help")
    if rest[:1] == ["parameter"]:  # as in Ollama
        rest = rest[1].split(maxsplit=1) if len(rest) > 1 else []
    if not rest:
        for name in NUMBERS:
            click.echo(f"{name} {getattr(sampling, name)}", err=True)
        click.echo(f"system {conversation.system or ''}", err=True)
        return sampling
    name = rest[0].replace("-", "_")
    value = rest[1] if len(rest) > 1 else ""
    if name == "system":
        conversation.system = value.strip('"')
        return sampling
    if name not in NUMBERS:
        remedy = f"use one of {', '.join(NUMBERS)}, system"
        raise ChangeSomething("/set", name, "is not a setting", remedy)
    try:
        change: dict[str, Any] = {name: NUMBERS[name](value)}
    except ValueError:
        raise ChangeSomething(f"/set {name}", value, "is not a number", "write one") from None
    return replace(sampling, **change)


def read_turns(interactive: bool) -> Iterator[str]:
    """Yield the user's turns, without empty ones, until ``/bye`` or the end of input.

    Lines between two triple quotation marks are one turn.
    """
    while True:
        turn = _read_line(interactive)
        if turn is None or turn.strip() in ENDS:
            return
        if turn.strip().startswith(QUOTES):
            turn = _read_lines(turn.strip().removeprefix(QUOTES), interactive)
        if turn.strip():
            yield turn.strip()


def _read_lines(first: str, interactive: bool) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = _read_line(interactive, "... ")
        if line is None:
            break
        lines.append(line.rstrip("\n"))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def _read_line(interactive: bool, mark: str = "> ") -> str | None:
    if interactive:
        try:
            return input(mark)
        except EOFError:
            return None
    return sys.stdin.readline() or None


def _take_turn(
    model: "LLM", conversation: Conversation, sampling: SamplingParams, *, as_json: bool
) -> str:
    """Stream one answer to stdout and return it; Ctrl-C keeps the part received so far."""
    prompt = model.tokenizer.encode_chat(conversation.messages())
    pieces = model.stream(prompt, sampling)
    answer = ""
    try:
        for piece in pieces:
            answer += piece
            if not as_json:
                click.echo(piece, nl=False)
    except KeyboardInterrupt:
        pieces.close()  # its request frees its memory immediately
    click.echo(json.dumps({"role": "assistant", "content": answer}) if as_json else "")
    return answer
