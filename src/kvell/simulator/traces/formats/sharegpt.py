"""ShareGPT's conversations: a JSON array, or JSON lines, of texts without times."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kvell.simulator.traces.formats.fields import Fields, wrong
from kvell.simulator.traces.formats.json_array import array_elements
from kvell.simulator.traces.rows import TraceRow

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
