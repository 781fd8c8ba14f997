"""Mooncake's traces: JSON lines of lengths and of ids of the prompt's blocks."""

from kvell.simulator.traces.formats.fields import Fields
from kvell.simulator.traces.formats.line_formats import LineFormat
from kvell.simulator.traces.rows import TraceRow

BLOCK_TOKENS = 512
"""Tokens of a block, by the format; a prompt's last block may be shorter."""
MILLISECOND = 1e-3
HASH_IDS = "hash_ids"
LENGTHS = ("timestamp", "input_length", "output_length")
MOONCAKE = LineFormat("Mooncake's", frozenset(LENGTHS), frozenset({HASH_IDS}))


def mooncake_row(fields: Fields, block_tokens: int | None) -> TraceRow:
    """Return the request of a line.

    An id stands for a block and all blocks before it, as in our own format.

    :param block_tokens: tokens of a block; None: those of the format.
    """
    return lengths_row(fields, MILLISECOND, block_tokens or BLOCK_TOKENS)


def lengths_row(fields: Fields, unit: float, block_tokens: int) -> TraceRow:
    """Return the request of a line with ``LENGTHS`` and maybe ids.

    :param unit: seconds in which its time counts.
    """
    ids = fields.block_ids(HASH_IDS)
    prompt_tokens = fields.whole_number("input_length", low=0)
    fields.check_blocks(HASH_IDS, ids, prompt_tokens, block_tokens)
    return TraceRow(
        fields.seconds("timestamp", unit),
        prompt_tokens,
        fields.whole_number("output_length", low=0),
        ids,
        block_tokens if len(ids) else 0,
    )
