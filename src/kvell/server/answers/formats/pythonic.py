"""Calls as Llama 4, Gemma 3 and LFM 2 write them (vLLM's ``pythonic``): the answer is a list.

::

    [weather(city="Bern"), add(a=1, b=[2, 3])]
    <|python_start|>[weather(city="Bern")]<|python_end|>

Each call is returned when it is complete.  Only literals are read; no code is executed.
"""

import ast
import re
import warnings
from typing import Any

from kvell.server.answers.deltas import AnswerDelta, Content, ToolCallArguments, ToolCallBegin
from kvell.server.answers.reading.json_calls import PYTHON, BracketSpan, is_name
from kvell.server.answers.reading.markers import Expect
from kvell.server.answers.reading.modes import SPACE, Chain, Mode, PlainText, Say, Step
from kvell.wire.json_text import DEEPEST, write_json

START, END, LIST, MORE, LIST_END = "<|python_start|>", "<|python_end|>", "[", ",", "]"
_LITERAL_NAMES = {"true": True, "false": False, "null": None}
_S = rf"[{SPACE}]{{0,64}}"
_HEAD = re.compile(rf"{_S}[A-Za-z_][A-Za-z0-9_.]{{0,255}}{_S}(?=\()")
_POSSIBLE = re.compile(rf"{_S}(?:[A-Za-z_][A-Za-z0-9_.]{{0,255}}{_S})?")


class Pythonic(Chain):
    """Calls from the first character on, or none."""

    def __init__(self) -> None:
        super().__init__(Expect(START, LIST, keeps_blank=True))

    def _next(self, ended: Mode) -> Mode:
        match ended:
            case Expect(marker="<|python_start|>"):
                return Expect(LIST, before=ended.opening)
            case Expect(marker="[" | ","):
                return PythonCall(self._calls, ended.opening)
            case Expect(marker="]"):
                return Expect(END)
            case PythonCall(begun=True):
                self._calls += 1
                return Expect(MORE, LIST_END)
            case Expect(before=before) if before:
                return Say(Content(before))
            case _:
                return PlainText(drops_blank=self._calls > 0)


class PythonCall:
    """One call, held back until its parenthesis closes; ``begun`` is False if it is not a call.

    :param opening: preceding text, which is content if no call follows.
    """

    def __init__(self, index: int, opening: str) -> None:
        self._index = index
        self._held = [opening]
        self._head: str | None = ""
        self._name = ""
        self._span = BracketSpan(PYTHON, first="(")
        self.begun = False

    def push(self, text: str) -> Step:
        if self._head is not None:
            text = self._head + text
            match = _HEAD.match(text)
            if match is None and _POSSIBLE.fullmatch(text):
                self._head = text
                return [], None
            if match is None:
                self._head = None
                return [Content("".join(self._held))], text
            self._head = None
            self._name = match.group()
            self._held.append(self._name)
            text = text[match.end() :]
        end = self._span.scan(text)
        self._held.append(text[:end])
        if not self._span.ended:
            return [], None
        return self._whole(), text[end:]

    def finish(self) -> list[AnswerDelta]:
        return [Content("".join(self._held) + (self._head or ""))]

    def _whole(self) -> list[AnswerDelta]:
        shallow = self._span.closed and self._span.deepest <= DEEPEST
        arguments = _arguments("".join(self._held[2:])) if shallow else None
        name = self._name.strip(SPACE)
        if arguments is None or not is_name(name):
            return [Content("".join(self._held))]
        self.begun = True
        return [ToolCallBegin(self._index, name), ToolCallArguments(self._index, arguments)]


def _arguments(text: str) -> str | None:
    """Return the JSON of a call's arguments; None if they are not all literals."""
    try:
        with warnings.catch_warnings():
            # Models write regular expressions without the prefix r, which causes SyntaxWarnings.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return write_json({_keyword(keyword): _literal(keyword.value) for keyword in call.keywords})
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("a mapping is spread")
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal.

    :raises ValueError: for any other expression.
    """
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id="true" | "false" | "null" as name):
            return _LITERAL_NAMES[name]
        case _:
            raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("not a key")
    return node.value
