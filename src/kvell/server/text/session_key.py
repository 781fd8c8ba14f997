"""What tells one conversation from another where the client does not say: how it begins."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_TOKENS = 256
"""Tokens of a plain prompt that tell its session."""
KEY_BYTES = 16
FIRST_CHARS, LAST_CHARS = 1 << 16, 1 << 10
"""Characters of a long text that tell its session, at its beginning and end; its length does too.

A picture in a conversation is a text of megabytes, and other requests wait for the loop.
"""


def conversation_key(messages: Iterable[Mapping[str, Any]]) -> str:
    """A digest of a conversation up to its first user message.

    All its later turns begin so too, and other conversations with the same system prompt do not.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for message in messages:
        role, content = str(message.get("role", "")), message.get("content", "")
        told = _told(content)
        digest.update(f"{len(role)}:{role}{len(told)}:{told}".encode())
        if role == "user":
            break
    return digest.hexdigest()


def prompt_key(token_ids: NDArray[np.int32]) -> str:
    """A digest of a prompt's first tokens (int32 ``[tokens]``)."""
    first = np.ascontiguousarray(token_ids[:FIRST_TOKENS], "<i4").tobytes()
    return hashlib.blake2b(first, digest_size=KEY_BYTES).hexdigest()


def _told(content: Any) -> str:
    """What tells a content from others, without reading all of a long one."""
    if isinstance(content, str):
        if len(content) <= FIRST_CHARS + LAST_CHARS:
            return content
        return f"{content[:FIRST_CHARS]}{len(content)}{content[-LAST_CHARS:]}"
    if isinstance(content, Mapping):
        return "".join(f"{key}:{_told(part)}" for key, part in content.items())
    if isinstance(content, Sequence):
        return "".join(f"{len(told)}:{told}" for told in map(_told, content))
    return str(content)
