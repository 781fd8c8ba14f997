"""Hints for a trace without hints, as clients that know their next turn would give them.

True hints are derived from the trace; a part of them is flipped, always for the same requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from kvell.simulator.traces.rows import TraceRow

_KEY = b"kvell"


def add_hints(rows: Sequence[TraceRow], wrong: float) -> list[TraceRow]:
    """Return the rows with new hints whether a later row returns to them.

    A later row returns to one if it continues its session's text, or if its prompt contains the
    row's last full block.

    :param wrong: part of the hints that are flipped, from 0 to 1.
    """
    later_blocks: set[int] = set()
    later_sessions: set[str] = set()
    hinted_rows: list[TraceRow] = []
    for index in range(len(rows) - 1, -1, -1):
        row = rows[index]
        returns = row.session in later_sessions or _last_full_block(row) in later_blocks
        hinted_rows.append(replace(row, will_return=returns != is_wrong(index, wrong)))
        later_blocks.update(row.block_ids.tolist())
        if row.session is not None:
            later_sessions.discard(row.session)
            if row.continues:
                later_sessions.add(row.session)
    return hinted_rows[::-1]


def is_wrong(index: int, share: float) -> bool:
    digest = blake2b(str(index).encode(), key=_KEY, digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def _last_full_block(row: TraceRow) -> int | None:
    full = row.prompt_tokens // row.block_tokens if row.block_tokens else 0
    return int(row.block_ids[full - 1]) if 0 < full <= len(row.block_ids) else None
