"""The parts of a streamed chat answer, and the protocol of the parsers that yield them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Reasoning text of the model."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """The beginning of a function call; its arguments follow.

    :param index: the call's position in the answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all pieces together are a JSON object's text."""

    index: int
    text: str


AnswerDelta: TypeAlias = Content | Reasoning | ToolCallBegin | ToolCallArguments


@dataclass(frozen=True)
class ToolCall:
    """A whole call.

    :param arguments: text of a JSON object, truncated if the answer is.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of a whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = field(default=())


def merge(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Return the deltas, with adjacent deltas of the same kind joined."""
    deltas = list(deltas)
    if len(deltas) < 2:
        return deltas
    runs: list[tuple[AnswerDelta, list[str]]] = []
    for delta in deltas:
        text = "" if isinstance(delta, ToolCallBegin) else delta.text
        if runs and _continues(runs[-1][0], delta):
            runs[-1][1].append(text)
        else:
            runs.append((delta, [text]))
    return [_with_text(first, "".join(texts)) for first, texts in runs]


def parse(deltas: Iterable[AnswerDelta]) -> ParsedAnswer:
    content = []
    reasoning = []
    names = list[str]()
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        match delta:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case ToolCallBegin(index, name):
                names.append(name)
                arguments[index] = []
            case ToolCallArguments(index, text):
                arguments[index].append(text)
    calls = tuple(ToolCall(name, "".join(arguments[i])) for i, name in enumerate(names))
    return ParsedAnswer("".join(content), "".join(reasoning), calls)


def _continues(last: AnswerDelta, delta: AnswerDelta) -> bool:
    if isinstance(delta, ToolCallBegin) or type(last) is not type(delta):
        return False
    return not isinstance(last, ToolCallArguments) or last.index == getattr(delta, "index", None)


def _with_text(delta: AnswerDelta, text: str) -> AnswerDelta:
    match delta:
        case ToolCallBegin():
            return delta
        case ToolCallArguments(index, _):
            return ToolCallArguments(index, text)
        case _:
            return type(delta)(text)
