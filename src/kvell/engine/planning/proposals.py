"""Speculation without a draft model: draft tokens are looked up in the text, then verified.

They are the tokens that followed the latest earlier occurrence of the text's end.  A step computes
them after the newest token.  A draft token is accepted if the model draws the same token there, as
it would without speculation (a draw's random number is a function of seed and output position
alone).  So speculation never changes tokens, only how many a step yields.
"""

import numpy as np
import numpy.typing as npt

LOOKUP_WINDOW_TOKENS = 32_768
"""Number of newest tokens in which draft tokens are looked up, in at most 0.1 ms."""
TOKEN_BYTES = 4

Ints = npt.NDArray[np.int32]


def propose(history: bytearray, count: int, longest: int, shortest: int) -> Ints:
    """Propose up to ``count`` draft tokens, int32; none if the text's end occurs only once.

    They are the tokens after the latest earlier occurrence of the longest suffix of ``shortest`` to
    ``longest`` tokens.  If they reach the end of the text they start over, as in a text that
    repeats itself.  Tokens of images (negative) end them.

    :param history: the text's token ids, little-endian int32.
    """
    following = None
    for size in range(shortest, longest + 1):
        start = _earlier(history, size)
        if start is None:
            break  # then no longer suffix occurs either
        following = start + size
    if following is None:
        return np.empty(0, np.int32)
    content = bytes(history[following * TOKEN_BYTES : (following + count) * TOKEN_BYTES])
    tokens = np.resize(np.frombuffer(content, "<i4").astype(np.int32), count)
    images = np.flatnonzero(tokens < 0)
    return tokens[: int(images[0])] if len(images) else tokens


def _earlier(history: bytearray, size: int) -> int | None:
    """Return the latest earlier position of the last ``size`` tokens, which it may overlap."""
    width = size * TOKEN_BYTES
    end = len(history)
    if size * TOKEN_BYTES >= end:
        return None
    suffix = history[end - width :]
    low = max(0, end - LOOKUP_WINDOW_TOKENS * TOKEN_BYTES)
    offset = history.rfind(suffix, low, end - TOKEN_BYTES)
    while offset > 0 and offset % TOKEN_BYTES:  # a match across token boundaries
        offset = history.rfind(suffix, low, offset + width - 1)
    return offset // TOKEN_BYTES if offset >= 0 else None
