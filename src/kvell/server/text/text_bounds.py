"""Which texts are too long to be encoded, and the memory that encoding the others takes.

Tokenizers take some hundred bytes of memory for every byte of a text, and a second for a megabyte.
So a text is refused by its length if no tokens that fit the context could spell it, and a text far
longer than tokens usually are is first counted in slices, which takes little memory and ends at
the first slice too many.  Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvell.errors import Bound, ChangeSomething
from kvell.vocabulary import KIB, MIB

USUAL_TOKEN_BYTES = 8
"""A text with at most so many bytes for each token of the context is encoded at once."""
LARGEST_TEXT_BYTES, LARGEST_MEAN_TOKEN_BYTES = 4 * MIB, 32
"""No text is longer than the larger of the first, and the second times the context's tokens."""
ANY_TEXT_BYTES = 512 * KIB
"""``/tokenize`` takes so much also where the context is smaller."""
SHORT_BYTES = 64 * KIB
"""Texts up to this length have a thread of their own, where no long text is before them."""
SLICE_CHARS = 32 * KIB
SLICED_FACTOR = 2
"""Slices may have so many times the context's tokens: a cut changes a few tokens around it."""
RENDERED_FACTOR = 4
"""A conversation may hold so many times the longest text: templates leave things out."""
MEMORY_PER_BYTE, MEMORY_PER_COUNTED_BYTE = 384, 128
"""Bytes of memory for a byte of text: of any, and where tokens are known to be few.

Measured with SmolLM2's tokenizer: 85 for white space, 137 for English, 188 for Chinese characters
at random, 257 for single letters between spaces; 347 with the lists and JSON of an answer to
``/tokenize``.
"""


class ContextTooLong(ChangeSomething):
    """A prompt that leaves no room for output, or not for as much as was asked for."""


def context_too_long(
    field: str,
    value: object,
    context_tokens: int,
    remedy: str,
    what: str = "the prompt is too long",
    bound: Bound | None = None,
) -> ContextTooLong:
    """The error of what does not fit the context.

    Clients (LiteLLM, LangChain, Inspect) know it by these words, and then send less.

    :param context_tokens: of prompt and output together, at most.
    :param what: says what is too long.
    """
    problem = f"This model's maximum context length is {context_tokens} tokens, and {what}"
    return ContextTooLong(field, value, problem, remedy, bound=bound)


def byte_length(text: str) -> int:
    """The length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def chars_within(value: object) -> int:
    """Characters of all strings in a value made of mappings and sequences, keys too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + chars_within(one) for key, one in value.items())
    if isinstance(value, Sequence):
        return sum(map(chars_within, value))
    return 0


@dataclass(frozen=True)
class TextBounds:
    """The bounds of one model's texts.

    :param max_model_len: tokens of its context.
    :param most_token_bytes: the most bytes of text that one token stands for.
    """

    max_model_len: int
    most_token_bytes: int

    @property
    def most_bytes(self) -> int:
        """The longest text that may fit the context."""
        largest = max(LARGEST_TEXT_BYTES, LARGEST_MEAN_TOKEN_BYTES * self.max_model_len)
        return min(self.max_model_len * self.most_token_bytes, largest)

    @property
    def any_bytes(self) -> int:
        """The longest text that is encoded although it need not fit."""
        return max(ANY_TEXT_BYTES, USUAL_TOKEN_BYTES * self.max_model_len)

    @property
    def memory_bytes(self) -> int:
        """The most memory that encoding takes at once: a long text and a short one."""
        long_bytes = max(
            MEMORY_PER_BYTE * self.any_bytes, MEMORY_PER_COUNTED_BYTE * self.most_bytes
        )
        return long_bytes + MEMORY_PER_BYTE * SHORT_BYTES

    def checked_bytes(
        self, field: str, text: str, *, answer_tokens: int = 1, fits: bool = True
    ) -> int:
        """The length of a text that may be encoded, in UTF-8.

        :param field: that has it, for errors.
        :param answer_tokens: for which it must leave room.
        :param fits: whether it must fit the context.
        :raises ContextTooLong: if it is longer than any text that fits.
        :raises ChangeSomething: if it is longer than anything that is encoded.
        """
        most_bytes = self.most_bytes if fits else self.any_bytes
        if len(text) <= most_bytes:  # there are at least as many bytes as characters
            text_bytes = byte_length(text)
            if text_bytes <= most_bytes:
                return text_bytes
        value = f"{len(text)} characters"
        if fits:
            raise self.too_long(field, value, answer_tokens)
        raise _too_large(field, value, most_bytes)

    def check_conversation(self, field: str, *, chars: int, fits: bool = True) -> None:
        """Check that a conversation can be rendered without much work.

        :param chars: of all that the template may show.
        :raises ChangeSomething: as :meth:`checked_bytes`.
        """
        most_bytes = RENDERED_FACTOR * (self.most_bytes if fits else self.any_bytes)
        if chars > most_bytes and fits:
            raise self.too_long(field, f"{chars} characters")
        if chars > most_bytes:
            raise _too_large(field, f"{chars} characters", most_bytes)

    def check_slices(
        self, field: str, text: str, count: Callable[[str], int], *, answer_tokens: int = 1
    ) -> None:
        """Check that a text which is long for its context has not far too many tokens.

        :param count: tokens of a slice; is not called again once they are too many.
        :raises ContextTooLong: if it has.
        """
        if len(text) <= SLICE_CHARS or byte_length(text) <= USUAL_TOKEN_BYTES * self.max_model_len:
            return
        left = SLICED_FACTOR * self.max_model_len
        for start in range(0, len(text), SLICE_CHARS):
            left -= count(text[start : start + SLICE_CHARS])
            if left < 0:
                raise self.too_long(field, f"{len(text)} characters", answer_tokens)

    def too_long(self, field: str, value: str, answer_tokens: int = 1) -> ContextTooLong:
        """The error of a text that was not encoded, since it can never fit."""
        remedy = f"send at most {self.max_model_len - answer_tokens} tokens"
        return context_too_long(field, value, self.max_model_len, remedy, bound="text_bytes")


def _too_large(field: str, value: str, most_bytes: int) -> ChangeSomething:
    remedy = f"send at most {most_bytes} bytes at a time"
    return ChangeSomething(field, value, "is too long", remedy, bound="text_bytes")
