"""Qwen-Bailian's traces: JSON lines of chats, with times in seconds and blocks of 16 tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np

from kvell.simulator.traces.formats.fields import Fields, show
from kvell.simulator.traces.formats.line_formats import LineFormat
from kvell.simulator.traces.formats.mooncake import HASH_IDS, LENGTHS, lengths_row
from kvell.simulator.traces.rows import TraceRow

BLOCK_TOKENS = 16
NO_PARENT = -1
BAILIAN = LineFormat(
    "Qwen-Bailian's",
    frozenset({*LENGTHS, HASH_IDS, "chat_id", "parent_chat_id", "type", "turn"}),
)


def bailian_rows(objects: Iterable[Fields], block_tokens: int | None) -> Iterator[TraceRow]:
    """Yield the request of each line.

    A turn waits for the answer to the previous turn of its chat.  An id is the hash of one block
    alone, so ids are combined with those before them.

    :param block_tokens: tokens of a block; None: those of the format.
    """
    sessions: dict[int | str, str] = {}
    for fields in objects:
        row = lengths_row(fields, 1.0, block_tokens or BLOCK_TOKENS)
        chat, parent = _id(fields, "chat_id"), _id(fields, "parent_chat_id")
        fields.whole_number("turn")
        fields.optional_text("type")
        is_first = parent == NO_PARENT
        session = str(chat) if is_first else sessions.get(parent, str(parent))
        sessions[chat] = session
        own = row.block_ids.tolist()
        chained = accumulate(own, lambda before, block: hash((before, block)), initial=0)
        ids = np.fromiter(chained, np.int64, len(own) + 1)[1:]
        yield replace(row, block_ids=ids, session=session)


def _id(fields: Fields, name: str) -> int | str:
    value = fields.raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise fields.wrong(name, f"is {show(value)}, neither a whole number nor text")
    return value
