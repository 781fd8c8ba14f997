"""The most text that one token stands for, to refuse too long texts before their encoding."""

from collections.abc import Iterable
from typing import Any

LOSSY_FACTOR = 8
"""Growth of a token beyond its spelling, if encoding may change or drop text.

Normal forms make three bytes of nine, white space and unknown words collapse; a text that shrinks
more than eightfold counts as too long.
"""


def most_token_bytes(backend: Any) -> int:
    """Return the most bytes of text (UTF-8) that one token stands for, special tokens included.

    Exact for byte-level tokenizers that change nothing; else :data:`LOSSY_FACTOR` times the longest
    spelling.

    :param backend: a tokenizer of transformers.
    """
    raw = getattr(backend, "backend_tokenizer", None)
    vocabulary: Iterable[str] = backend.get_vocab()
    added = [str(entry.content) for entry in backend.added_tokens_decoder.values()]
    if raw is not None and _keeps_every_byte(raw, backend):
        # A character of a spelling is a byte; only added tokens are spelled literally.
        spelled = max(map(len, vocabulary), default=1)
        return max(1, spelled, *(len(text.encode()) for text in added))
    return LOSSY_FACTOR * max(1, *(len(text.encode()) for text in (*vocabulary, *added)))


def _keeps_every_byte(raw: Any, backend: Any) -> bool:
    """Return whether the texts of a text's tokens, joined, are the text."""
    swallows = any(entry.lstrip or entry.rstrip for entry in backend.added_tokens_decoder.values())
    byte_level = type(raw.decoder).__name__ == "ByteLevel"
    return byte_level and raw.normalizer is None and not swallows
