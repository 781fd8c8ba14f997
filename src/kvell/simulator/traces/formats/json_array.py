"""Reader of a JSON array from a file, which keeps at most one element in memory."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvell.simulator.traces.formats.fields import MOST_VALUES, Fields, wrong
from kvell.simulator.traces.rows import TraceRow
from kvell.wire.decoding import has_more_values

CHUNK_CHARS = 1 << 16
MOST_ELEMENT_CHARS = 1 << 22
WORD_CHARS = 16
"""Longer than any word, number's sign or escape that the end of a chunk may cut."""
BLANKS = re.compile(r"[ \t\r\n]*")


def begins_with_array(file: IO[str]) -> bool:
    while text := file.read(CHUNK_CHARS):
        if text := text.lstrip():
            return text.startswith("[")
    return False


def array_elements(path: Path, file: IO[str]) -> Iterator[tuple[int, object]]:
    """Yield each element, an object, with the number of its line.

    :raises ChangeSomething: naming file and line of an element that is not JSON, or no object.
    """
    reader = _Reader(path, file)
    reader.skip("[")
    if reader.next_char() == "]":
        return
    while True:
        yield reader.line, reader.element()
        if reader.next_char() == "]":
            return
        reader.skip(",")
        reader.next_char()


class _Reader:
    """The text of a file, without the part that is read already.

    :ivar line: number of the line of the next character.
    """

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file
        self._text, self._at, self._is_whole = "", 0, False
        self._decoder = json.JSONDecoder(strict=False)
        self.line = 1

    def next_char(self) -> str:
        """Return the next character that is not blank, and stay before it; "" at the end."""
        while True:
            blanks = BLANKS.match(self._text, self._at)
            self._step_to(blanks.end() if blanks else self._at)
            if self._at < len(self._text) or self._is_whole:
                return self._text[self._at : self._at + 1]
            self._read_more(CHUNK_CHARS)

    def skip(self, char: str) -> None:
        if (present := self.next_char()) != char:
            raise self._wrong(f"has {present or 'its end'!r} where {char!r} is expected")
        self._step_to(self._at + 1)

    def element(self) -> object:
        """Return the next element, and move past it."""
        if (present := self.next_char()) != "{":
            raise self._wrong(f"has {present or 'its end'!r} where an object is expected")
        while True:
            try:
                element, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                is_open_text = error.msg.startswith("Unterminated string")
                is_cut_off = is_open_text or error.pos + WORD_CHARS >= len(self._text)
                if self._is_whole or not is_cut_off:
                    self._step_to(min(error.pos, len(self._text)))
                    raise self._wrong(f"is not JSON ({error.msg})") from error
            except RecursionError as error:
                raise self._wrong("is nested too deeply") from error
            else:
                self._step_to(end)
                return element
            have = len(self._text) - self._at
            if has_more_values(self._text[self._at :], MOST_VALUES):
                raise self._wrong(f"begins an object of more than {MOST_VALUES} values")
            if have > MOST_ELEMENT_CHARS:
                raise self._wrong(f"begins an object of more than {MOST_ELEMENT_CHARS} characters")
            self._read_more(have)  # twice as much, so that few tries are in vain

    def _step_to(self, end: int) -> None:
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def _read_more(self, chars: int) -> None:
        more = self._file.read(max(chars, CHUNK_CHARS))
        self._is_whole = not more
        self._text = self._text[self._at :] + more
        self._at = 0

    def _wrong(self, problem: str) -> Exception:
        return wrong(f"{self._path}:{self.line}", "line", problem)


CountTokens = Callable[[str], int]
"""Returns the tokens of a text."""
CONVERSATIONS = "conversations"
ANSWERS = frozenset(("gpt", "chatgpt", "bing", "bard", "assistant"))
"""Speakers whose texts are answers; those of all others belong to prompts."""
ASKS = frozenset(("human", "user"))
BYTES_PER_TOKEN = 4


def approximate_tokens(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def array_rows(path: Path, file: IO[str], count: CountTokens) -> Iterator[TraceRow]:
    for index, (line, element) in enumerate(array_elements(path, file)):
        place = f"{path}:{line}"
        if not isinstance(element, dict) or CONVERSATIONS not in element:
            raise wrong(place, f"[{index}]", f"is not an object with {CONVERSATIONS}")
        yield from conversation_rows(Fields(place, element, f"[{index}]."), index, count)


def conversation_rows(fields: Fields, index: int, count: CountTokens) -> Iterator[TraceRow]:
    """Yield a request for each answer that follows a question.

    Its prompt is all text before it: it continues the conversation's last request. All arrive at 0,
    since the format has no times.
    """
    last: TraceRow | None = None
    new_tokens, is_asked = 0, False
    for turn in fields.objects(CONVERSATIONS):
        speaker = turn.optional_text("from")
        tokens = _tokens(turn, count)
        if speaker is None:
            raise turn.wrong("from", "is missing")
        if is_asked and tokens and speaker in ANSWERS:
            prompt = new_tokens + (last.num_tokens if last else 0)
            last = TraceRow(0.0, prompt, tokens, session=str(index), continues=last is not None)
            yield last
            new_tokens, is_asked = 0, False
            continue
        new_tokens += tokens
        is_asked = is_asked or (speaker in ASKS and tokens > 0)


def _tokens(turn: Fields, count: CountTokens) -> int:
    """Return the tokens of a turn's text; half a surrogate pair, which is not text, is replaced."""
    text = turn.optional_text("value")
    if text is None:
        raise turn.wrong("value", "is missing")
    return count(text.encode(errors="replace").decode()) if text else 0
