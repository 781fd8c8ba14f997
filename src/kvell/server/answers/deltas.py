"""The parts of a chat answer, as they come, and what turns text into them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote while it thought."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A call of a function; its arguments follow.

    :param index: of the call in the answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """The next piece of a call's arguments, which joined are the text of a JSON object."""

    index: int
    text: str


AnswerDelta: TypeAlias = Content | Reasoning | ToolCallBegin | ToolCallArguments


class AnswerParser(Protocol):
    """Turns one answer's text into its parts.

    How the text was cut into pushes does not change the merged parts.
    """

    def push(self, text: str) -> list[AnswerDelta]:
        """Parts that are certain with this text."""
        ...

    def finish(self) -> list[AnswerDelta]:
        """Parts still held back; call once, when no text follows."""
        ...


@dataclass(frozen=True)
class ToolCall:
    """A whole call.

    :param arguments: the text of a JSON object, cut off if the answer was.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of a whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = field(default=())


def merged(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Deltas in which neighbours of one kind are one."""
    runs: list[tuple[AnswerDelta, list[str]]] = []
    for delta in deltas:
        text = "" if isinstance(delta, ToolCallBegin) else delta.text
        if runs and _continues(runs[-1][0], delta):
            runs[-1][1].append(text)
        else:
            runs.append((delta, [text]))
    return [_with_text(first, "".join(texts)) for first, texts in runs]


def parsed(deltas: Iterable[AnswerDelta]) -> ParsedAnswer:
    """The parts of the answer that these deltas make."""
    content, reasoning, names = [], [], list[str]()
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


def parsed_text(parser: AnswerParser, text: str) -> ParsedAnswer:
    """The parts of a whole answer, with a fresh parser."""
    return parsed([*parser.push(text), *parser.finish()])


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
