"""What a compiled pass takes of memory, said before it runs: every buffer, to the byte.

In the order in which they lie in what a step is lent::

    attention: a slice for each thread, records of split contexts │ the step's rows │ logits

``csrc/forward/workspace.cpp`` cuts the rows; a step that is lent less than this is refused there.
"""

from dataclasses import dataclass

from kvell.elastic.arena import StepBuffers

ALIGN_BYTES = 128
FLOAT_BYTES = 4


@dataclass(frozen=True)
class DecoderShape:
    """What sizes of a decoder's buffers follow from.

    :param projected: numbers of a token's queries, keys and values, and of a mixer's inputs.
    :param inner: width of the MLP, as it is packed.
    :param mixed: numbers of a token that a mixer's convolution makes, as they lie; 0 without one.
    :param gated: numbers of a token that a mixer's output projection reads.
    :param rotated: cosines and sines of a token, of all rotations.
    :param element_bytes: of what products read: 4 in float32, 2 in bfloat16.
    """

    hidden: int
    attended: int
    projected: int
    inner: int
    mixed: int
    gated: int
    rotated: int
    vocab: int
    element_bytes: int

    def rows_bytes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By buffer, bytes for each token, and for each row of logits but the logits."""
        size, hidden, attended = self.element_bytes, self.hidden, self.attended
        by_token = (
            FLOAT_BYTES * hidden,  # stream
            size * hidden,  # normed
            FLOAT_BYTES * self.projected,
            size * attended,  # query
            size * attended,
            size * self.inner,
            FLOAT_BYTES * hidden,  # branch
            FLOAT_BYTES * self.rotated,
            FLOAT_BYTES * self.mixed,
            size * self.gated,
        )
        return by_token, (FLOAT_BYTES * hidden, size * attended, size * self.gated)

    def buffers(self, attention_bytes: int) -> StepBuffers:
        """All of a step.

        :param attention_bytes: of slices and records, whatever the step.
        """
        by_token, by_row = self.rows_bytes()
        fixed_bytes = aligned(attention_bytes)
        by_row = (*by_row, FLOAT_BYTES * self.vocab)
        return StepBuffers(fixed_bytes, by_token, by_row, ALIGN_BYTES)


@dataclass(frozen=True)
class StepParts:
    """Where a step's parts begin, in bytes from the beginning of what it is lent."""

    attention_bytes: int
    rows_bytes: int
    logits_bytes: int

    @property
    def logits_at(self) -> int:
        """Behind slices, records and rows."""
        return self.attention_bytes + self.rows_bytes

    @property
    def total_bytes(self) -> int:
        """What it must be lent."""
        return self.logits_at + aligned(self.logits_bytes)


def aligned(size_bytes: int) -> int:
    """Up to where the next buffer may begin."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
