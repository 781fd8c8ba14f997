"""The start of each token's text in the text of an answer, in characters."""

import codecs
from collections.abc import Callable

from tokenizers import decoders
from typing_extensions import override

from kvell.models.text.answer_text import Preceding
from kvell.models.text.detokenizer import IncrementalDetokenizer, is_byte_token, token_bytes
from kvell.models.text.tokenizer import Tokenizer


class TokenOffsets:
    """Offsets of one answer's tokens, whose bytes joined are its text.

    A token that begins within a character has that character's offset.

    :param bytes_of: a token's bytes; none for a token that is not shown.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._chars = 0

    def push(self, token: int) -> int:
        data = self._bytes_of(token)
        if not data:
            return self._chars
        start = self._chars
        begun = self._decoder.decode(data[:1])
        if not 0x80 <= data[0] < 0xC0:  # it continues no character: the previous one is complete
            start += len(begun) - (data[0] < 0x80)
        self._chars += len(begun) + len(self._decoder.decode(data[1:]))
        return start


class _WindowOffsets(TokenOffsets):
    """Offsets for other tokenizers, some of whose tokens spell single bytes."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: IncrementalDetokenizer) -> None:
        super().__init__(lambda token: token_bytes(tokenizer, token))
        self._tokenizer, self._detokenizer = tokenizer, detokenizer
        self._given = 0

    @override
    def push(self, token: int) -> int:
        self._given += len(self._detokenizer.push([token]))
        if is_byte_token(self._tokenizer.spelling(token) or ""):
            return super().push(token)
        start = self._chars + len(self._decoder.decode(b"", final=True))
        self._chars = self._given
        return start


def token_offsets(
    tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: Preceding = ()
) -> TokenOffsets:
    """Return the offsets of a new answer's tokens.

    :param after: the answer's prompt.
    """
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, after)
        return _WindowOffsets(tokenizer, detokenizer)
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    return TokenOffsets(lambda token: b"" if token in skipped else token_bytes(tokenizer, token))
