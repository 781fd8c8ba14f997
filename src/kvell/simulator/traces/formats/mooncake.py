"""Mooncake's traces: JSON lines of lengths and of ids of the prompt's blocks."""

from collections.abc import Mapping

from kvell.simulator.traces.formats.fields import Fields
from kvell.simulator.traces.rows import TraceRow

BLOCK_TOKENS = 512
"""Tokens of a block, by the format; a prompt's last block may be shorter."""
MILLISECOND = 1e-3


def is_mooncake(raw: Mapping[str, object]) -> bool:
    """Return whether the first line of a file is of this format."""
    return "input_length" in raw and "prompt_tokens" not in raw


def mooncake_row(fields: Fields) -> TraceRow:
    """Return the request of a line.

    An id stands for a block and all blocks before it, as in our own format.
    """
    ids = fields.block_ids("hash_ids")
    prompt_tokens = fields.whole_number("input_length", low=0)
    fields.check_blocks("hash_ids", ids, prompt_tokens, BLOCK_TOKENS)
    return TraceRow(
        fields.seconds("timestamp", MILLISECOND),
        prompt_tokens,
        fields.whole_number("output_length", low=0),
        ids,
        BLOCK_TOKENS if len(ids) else 0,
    )
