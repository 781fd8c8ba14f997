"""Memory that a compiled pass needs, known before it runs: all buffers, to the byte.

In their order in a step's memory::

    attention: a slice for each thread, records of split contexts │ the step's rows │ logits

``csrc/forward/workspace.cpp`` lays out the rows. A step with less memory than this is refused, by
:class:`FusedDecoder` and again by ``csrc/forward/module.cpp``.
"""

from dataclasses import dataclass

from kvell.elastic.arena import StepBuffers

ALIGN_BYTES = 128
FLOAT_BYTES = 4


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that determine a decoder's buffers.

    :param projected: numbers of a token's queries, keys and values, and of a mixer's inputs.
    :param inner: packed width of the MLP.
    :param mixed: padded numbers of a token that a mixer's convolution makes; 0 without a mixer.
    :param gated: numbers of a token that a mixer's output projection reads.
    :param rotated: cosines and sines of a token, over all rotations.
    :param element_bytes: size of a number that products read: 4 in float32, 2 in bfloat16.
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
        """Return bytes by buffer: for each token, and for each row of logits without the logits."""
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
        """Return all buffers of a step.

        :param attention_bytes: bytes of slices and records, the same for every step.
        """
        by_token, by_row = self.rows_bytes()
        fixed_bytes = align(attention_bytes)
        by_row = (*by_row, FLOAT_BYTES * self.vocab)
        return StepBuffers(fixed_bytes, by_token, by_row, ALIGN_BYTES)


@dataclass(frozen=True)
class StepParts:
    """The parts of a step's memory, in bytes; offsets are from its beginning."""

    attention_bytes: int
    rows_bytes: int
    logits_bytes: int

    @property
    def logits_at(self) -> int:
        return self.attention_bytes + self.rows_bytes

    @property
    def total_bytes(self) -> int:
        return self.logits_at + align(self.logits_bytes)


def align(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
