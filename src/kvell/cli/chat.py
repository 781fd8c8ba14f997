"""``kvell chat``: a conversation, from a terminal or line by line from a pipe."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
from kvell.cli.terminal.session import Model, Session
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.errors import ChangeSomething

HELP = "/quit ends, /reset starts over, Ctrl-C stops an answer"


@dataclass
class Conversation:
    """The messages so far, which each turn sends again; the prefix cache makes that cheap."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return all messages, the system message first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def add(self, role: str, content: str) -> None:
        """Append one message."""
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
    """Talk with a model; reads lines when stdin is not a terminal."""
    require_one_model(settings)
    drawn = SamplingParams(**sampling)
    with progress_bar("loading") as report:
        model = session.open_model(with_kv_memory(settings, session), session.cache_dir, report)
    interactive = sys.stdin.isatty()
    if interactive:
        for line in [*model.contract.lines(), "", HELP]:
            click.echo(line, err=True)
    talk(model, Conversation(system), drawn, as_json=as_json, interactive=interactive)


def talk(
    model: Model,
    conversation: Conversation,
    sampling: SamplingParams,
    *,
    as_json: bool,
    interactive: bool,
) -> None:
    """Answer turns until ``/quit`` or the end of input.

    :raises ChangeSomething: if a turn cannot be answered and the input is not interactive.
    """
    for turn in read_turns(interactive):
        if turn == "/reset":
            conversation.turns.clear()
            continue
        conversation.add("user", turn)
        try:
            answer = _take_turn(model, conversation, sampling, as_json=as_json)
        except ChangeSomething as error:
            if not interactive:
                raise
            conversation.turns.pop()
            click.echo(f"kvell: {as_flags(error)} (or /reset)", err=True)
            continue
        conversation.add("assistant", answer)


def read_turns(interactive: bool) -> Iterator[str]:
    """Yield the user's turns, without empty lines, until ``/quit`` or the end of input."""
    while True:
        turn = _read_line(interactive)
        if turn is None or turn.strip() in {"/quit", "/exit"}:
            return
        if turn.strip():
            yield turn.strip()


def _read_line(interactive: bool) -> str | None:
    if interactive:
        try:
            return input("> ")
        except EOFError:
            return None
    return sys.stdin.readline() or None


def _take_turn(
    model: Model, conversation: Conversation, sampling: SamplingParams, *, as_json: bool
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
        _close(pieces)
    click.echo(json.dumps({"role": "assistant", "content": answer}) if as_json else "")
    return answer


def _close(pieces: Iterator[str]) -> None:
    """End a stream early so that its request frees its memory immediately."""
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
