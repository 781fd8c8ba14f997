"""The memory of answers that are not sent yet, which all models of a process share."""

from kvell.engine.requests.equal_parts import EqualParts
from kvell.vocabulary import MIB

TOLD_BYTES = 64 * MIB
"""The most bytes of log probabilities of one tenant's unfinished answers."""
ANSWER_BYTES = 256 * MIB
"""The most bytes of texts and vectors of one tenant's unfinished answers."""
MOST_KEPT_BYTES = (TOLD_BYTES + ANSWER_BYTES) * 5 // 2
"""The most bytes of all unfinished answers (:class:`.EqualParts`)."""


class AnswerMemory:
    """Bytes of answers by tenant, counted until their requests end.

    :ivar logprobs: bytes of log probabilities.
    :ivar texts: bytes of tokens, texts and vectors.
    """

    def __init__(self) -> None:
        self.logprobs = EqualParts(
            TOLD_BYTES, "logprob_bytes", "bytes of log probabilities are kept"
        )
        self.texts = EqualParts(ANSWER_BYTES, "answer_bytes", "bytes of answers wait to be read")


def text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
