"""Streaming of token ids to text, in whole characters that never change again.

There are two ways, by how the tokenizer joins tokens. Byte-level tokenizers are exact byte for
byte: every token is a run of bytes, and an incremental UTF-8 decoder holds back incomplete
characters::

    ids ──► bytes ──► UTF-8 decoder (holds at most 3 bytes) ──► text

All others are decoded in a window that starts before the newest text, and new text is returned only
once it can no longer change.
"""

import codecs
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import Protocol

from tokenizers import decoders

from kvell.models.text.answer_text import Preceding
from kvell.models.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens before an answer with which its decoding begins; any that have text would do."""
SLICE_TOKENS = 4096
"""Tokens that are decoded together: the tokenizers library lets no other thread run meanwhile."""
MOST_WINDOW_TOKENS = 64
"""Tokens of a window whose last tokens have no text; of more only the first and last are kept."""
MOST_SPELLINGS = 1 << 18
"""Byte-level tokens whose bytes are cached: enough for a whole vocabulary."""


class IncrementalDetokenizer:
    """Text of one request's output, as it grows.

    The results of all pushes and of :meth:`finish`, joined, are the text that these ids add to
    ``tokenizer.decode`` of the prompt.

    :param after: the prompt: an answer's first space is stripped only if no text precedes it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after: Preceding = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._way: _Way = _ByteLevel() if byte_level else _Window(tokenizer, after)

    def push(self, token_ids: Iterable[int]) -> str:
        """Return text that these ids made final; may be empty, never ends inside a character."""
        texts = []
        for token in map(int, token_ids):
            spelling = self._tokenizer.spelling(token)
            if spelling is not None and token not in self._skipped:
                texts.append(self._way.push(token, spelling))
        return "".join(texts)

    def push_slice(self, token_ids: Iterable[int]) -> str:
        """Return what :meth:`push` does, or less for now; faster for many ids."""
        spelled = [(token, self._tokenizer.spelling(token)) for token in map(int, token_ids)]
        return self._way.push_slice(
            [
                (token, spelling)
                for token, spelling in spelled
                if spelling is not None and token not in self._skipped
            ]
        )

    def finish(self) -> str:
        return self._way.finish()


class _Way(Protocol):
    def push(self, token: int, spelling: str) -> str: ...

    def push_slice(self, spelled: Sequence[tuple[int, str]]) -> str: ...

    def finish(self) -> str: ...


class _ByteLevel:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int, spelling: str) -> str:
        return self._decoder.decode(spelled_bytes(spelling))

    def push_slice(self, spelled: Sequence[tuple[int, str]]) -> str:
        return self._decoder.decode(b"".join([spelled_bytes(each) for _, each in spelled]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """Detokenizer for all others: decode the newest tokens together with those before.

    ::

        ids:  │ context, its text returned  │ held, its text not final │
              0                             given                      end

    The context is there because joining depends on neighbours (a leading space is stripped at the
    very start only); it always holds a token that produced text.
    """

    def __init__(self, tokenizer: Tokenizer, after: Preceding = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = _context(tokenizer, after)
        self._given = len(self._ids)

    def push(self, token: int, spelling: str) -> str:
        self._ids.append(token)
        # A run of byte tokens is decoded as a whole: final only when another kind follows.
        if is_byte_token(spelling):
            return ""
        return self.finish()

    def push_slice(self, spelled: Sequence[tuple[int, str]]) -> str:
        self._ids += [token for token, _ in spelled]
        return "" if not spelled or is_byte_token(spelled[-1][1]) else self.finish()

    def finish(self) -> str:
        before, text = self._text(self._given), self._text(len(self._ids))
        new = text[len(before) :]
        if before and new:
            self._ids = self._ids[self._given :]
        elif not new and len(self._ids) > MOST_WINDOW_TOKENS:  # tokens without text
            self._ids = self._ids[:CONTEXT_TOKENS] + self._ids[-CONTEXT_TOKENS:]
        self._given = len(self._ids)
        return new

    def _text(self, count: int) -> str:
        return self._tokenizer.decode(self._ids[:count], skip_special_tokens=False)


def decode_in_slices(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, including special tokens; other threads run meanwhile."""
    if len(token_ids) <= SLICE_TOKENS:
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    starts = range(0, len(token_ids), SLICE_TOKENS)
    texts = [detokenizer.push_slice(token_ids[at : at + SLICE_TOKENS]) for at in starts]
    return "".join([*texts, detokenizer.finish()])


def _context(tokenizer: Tokenizer, tokens: Preceding) -> list[int]:
    """Return the last tokens that are text by themselves, in order.

    A byte may be a part of a character that an answer completes: it would change its text.
    """
    context: list[int] = []
    for token in map(int, reversed(tokens)):
        spelling = tokenizer.spelling(token)
        if token in tokenizer.special_ids or spelling is None or is_byte_token(spelling):
            continue
        context.append(token)
        if len(context) == CONTEXT_TOKENS:
            break
    return context[::-1]


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the characters
    from U+0100 on (GPT-2's table).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(plain))
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


@lru_cache(MOST_SPELLINGS)
def spelled_bytes(spelling: str) -> bytes:
    """Return a byte-level token's bytes; with other characters it is literal UTF-8."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[character] for character in spelling])
    except KeyError:
        return spelling.encode()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of one token, which may be a part of a character; none for an unknown id."""
    spelling = tokenizer.spelling(token_id)
    if spelling is None:
        return b""
    if token_id in tokenizer.special_ids:
        return spelling.encode()
    if is_byte_token(spelling):
        return bytes([int(spelling[3:5], 16)])
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return spelled_bytes(spelling)
    # After itself: a leading space is stripped at the start of a text only.
    single, two = (tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
    return two[len(single) :].encode()


def is_byte_token(spelling: str) -> bool:
    return len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")
