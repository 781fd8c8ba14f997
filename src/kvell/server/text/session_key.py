"""Session keys of requests without one: digests of the beginning of a conversation or prompt."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_TOKENS = 256
"""The number of a plain prompt's first tokens that make its session key."""
KEY_BYTES = 16
FIRST_CHARS, LAST_CHARS = 1 << 16, 1 << 10
"""The characters at a long text's beginning and end that, with its length, make the session key.

A picture in a conversation is a text of megabytes, and hashing it all would block the event loop.
"""


def conversation_key(messages: Iterable[Mapping[str, Any]]) -> str:
    """Return a digest of a conversation up to its first user message.

    Later turns of a conversation have the same digest; other conversations with the same system
    prompt do not.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for message in messages:
        role = str(message.get("role", ""))
        content = message.get("content", "")
        shown = _told(content)
        digest.update(f"{len(role)}:{role}{len(shown)}:{shown}".encode())
        if role == "user":
            break
    return digest.hexdigest()


def prompt_key(token_ids: NDArray[np.int32]) -> str:
    """Return a digest of a prompt's first tokens (int32 ``[tokens]``)."""
    first = np.ascontiguousarray(token_ids[:FIRST_TOKENS], "<i4").tobytes()
    return hashlib.blake2b(first, digest_size=KEY_BYTES).hexdigest()


def _told(content: Any) -> str:
    if isinstance(content, str):
        if len(content) <= FIRST_CHARS + LAST_CHARS:
            return content
        return f"{content[:FIRST_CHARS]}{len(content)}{content[-LAST_CHARS:]}"
    if isinstance(content, Mapping):
        return _told("".join(f"{key}:{_told(part)}" for key, part in content.items()))
    if isinstance(content, Sequence):
        return _told("".join(f"{len(part)}:{part}" for part in map(_told, content)))
    return str(content)
