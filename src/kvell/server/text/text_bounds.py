"""Bounds on the texts that are encoded, and the memory that encoding takes.

Tokenizers take some hundred bytes of memory for each byte of a text, and a second for a megabyte.
So a text is refused by its length if even the longest tokens could not fit it into the context.
Tokens of other long texts are first counted in slices, which takes little memory and stops at the
first slice beyond the context.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvell.engine.requests.turns import EqualParts
from kvell.errors import Bound, ChangeSomething
from kvell.vocabulary import KIB, MIB

USUAL_TOKEN_BYTES = 8
"""A text with at most this number of bytes per token of the context is encoded without slices."""
LARGEST_TEXT_BYTES = 4 * MIB
LARGEST_MEAN_TOKEN_BYTES = 32
"""The longest text has the first size, or the second times the context's tokens if larger."""
ANY_TEXT_BYTES = 512 * KIB
"""The longest text that ``/tokenize`` always accepts, even if the context is shorter."""
SHORT_BYTES = 64 * KIB
"""The longest text for the thread of short texts."""
SLICE_CHARS = 32 * KIB
SLICED_FACTOR = 2
"""The most tokens in slices, as a factor of the context: a cut changes a few tokens around it."""
RENDERED_FACTOR = 4
"""The longest conversation, as a factor of the longest text: templates omit parts."""
MEMORY_PER_BYTE, MEMORY_PER_COUNTED_BYTE = 384, 128
"""The memory per byte of text: of any text, and of one whose tokens were counted in slices.

Measured with SmolLM2's tokenizer: 85 for white space, 137 for English, 188 for Chinese characters
at random, 257 for single letters between spaces; 347 with the lists and JSON of an answer to
``/tokenize``.
"""


class ContextTooLong(ChangeSomething):
    """A prompt that leaves too little room for its output."""


def context_too_long(
    field: str,
    value: object,
    context_tokens: int,
    remedy: str,
    bound: Bound | None = None,
) -> ContextTooLong:
    """Return the error of a request that does not fit the context.

    Clients (LiteLLM, LangChain, Inspect) recognize it by this text, and then send less.

    :param context_tokens: most tokens of prompt and output together.
    """
    problem = (
        f"This model's maximum context length is {context_tokens} tokens, "
        "and the prompt is too long"
    )
    return ContextTooLong(field, value, problem, remedy, bound=bound)


def byte_length(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def chars_within(value: object) -> int:
    """Return the number of characters in all strings and keys of a JSON value."""
    chars = 0
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            chars += sum(len(str(key)) for key in part)
            pending.extend(part.values())
        elif isinstance(part, Sequence):
            pending.extend(part)
    return chars


@dataclass(frozen=True)
class TextBounds:
    """The bounds of one model's texts.

    :param max_model_len: tokens of the model's context.
    :param most_token_bytes: UTF-8 bytes of the longest token.
    """

    max_model_len: int
    most_token_bytes: int

    @cached_property
    def most_bytes(self) -> int:
        largest = max(LARGEST_TEXT_BYTES, LARGEST_MEAN_TOKEN_BYTES * self.max_model_len)
        return min(self.max_model_len * self.most_token_bytes, largest)

    @cached_property
    def any_bytes(self) -> int:
        return max(ANY_TEXT_BYTES, USUAL_TOKEN_BYTES * self.max_model_len)

    @property
    def memory_bytes(self) -> int:
        long_bytes = max(
            MEMORY_PER_BYTE * self.any_bytes, MEMORY_PER_COUNTED_BYTE * self.most_bytes
        )
        return long_bytes + MEMORY_PER_BYTE * SHORT_BYTES

    def checked_bytes(
        self, field: str, text: str, *, answer_tokens: int = 1, fits: bool = True
    ) -> int:
        """Check that a text may be encoded; return its length in UTF-8.

        :param field: the request's field with the text, for errors.
        :param answer_tokens: tokens of output that must fit after the text.
        :param fits: whether the text must fit the context.
        :raises ContextTooLong: if the text must fit and is longer than any text that can.
        :raises ChangeSomething: if the text need not fit and is too long to be encoded.
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
        """Check that a conversation can be rendered at little cost.

        :param chars: characters of all values that the template may render.
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
        """Check that a text which is long for the context does not have far too many tokens.

        :param count: returns the tokens of a slice; not called again once there are too many.
        :raises ContextTooLong: if the text has too many tokens.
        """
        if len(text) <= SLICE_CHARS or byte_length(text) <= USUAL_TOKEN_BYTES * self.max_model_len:
            return
        left = SLICED_FACTOR * self.max_model_len
        for start in range(0, len(text), SLICE_CHARS):
            left -= count(text[start : start + SLICE_CHARS])
            if left < 0:
                raise self.too_long(field, f"{len(text)} characters", answer_tokens)

    def too_long(self, field: str, value: str, answer_tokens: int = 1) -> ContextTooLong:
        remedy = f"send at most {self.max_model_len - answer_tokens} tokens"
        return context_too_long(field, value, self.max_model_len, remedy, bound="text_bytes")


def _too_large(field: str, value: str, most_bytes: int) -> ChangeSomething:
    remedy = f"send at most {most_bytes} bytes at a time"
    return ChangeSomething(field, value, "is too long", remedy, bound="text_bytes")


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


@dataclass(frozen=True)
class AnswerRoom:
    """The output tokens that may follow a prompt.

    :param usual_tokens: limit of a request without ``max_tokens``.
    :param most_tokens: most tokens of any request; a larger limit is lowered to it.
    """

    usual_tokens: int
    most_tokens: int


@dataclass(frozen=True)
class ContextLength:
    """The limits of prompt and answer together, in tokens.

    :param alone_tokens: limit in the memory of one instance.
    :param reach: returns the current limit with loans, which depends on the number of instances.
    :param model_tokens: limit for any number of instances; 0: ``alone_tokens``.
    """

    alone_tokens: int
    reach: Callable[[], int] | None = None
    model_tokens: int = 0

    @property
    def longest_tokens(self) -> int:
        return max(self.alone_tokens, self.model_tokens)

    @property
    def reach_tokens(self) -> int:
        return self.alone_tokens if self.reach is None else max(self.alone_tokens, self.reach())

    def answer_room(self, prompt_tokens: int) -> AnswerRoom:
        """Return the room after a prompt; the usual answer stays in one instance if possible."""
        alone, most = self.alone_tokens - prompt_tokens, self.reach_tokens - prompt_tokens
        return AnswerRoom(alone if alone > 0 else most, most)
