"""What tells one conversation from another where the client does not say: how it begins."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_TOKENS = 256
"""Tokens of a plain prompt that tell its session."""
KEY_BYTES = 16


def conversation_key(messages: Iterable[Mapping[str, Any]]) -> str:
    """A digest of a conversation up to its first user message.

    All its later turns begin so too, and other conversations with the same system prompt do not.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for message in messages:
        role, content = str(message.get("role", "")), str(message.get("content", ""))
        digest.update(f"{len(role)}:{role}{len(content)}:{content}".encode())
        if role == "user":
            break
    return digest.hexdigest()


def prompt_key(token_ids: NDArray[np.int32]) -> str:
    """A digest of a prompt's first tokens (int32 ``[tokens]``)."""
    first = np.ascontiguousarray(token_ids[:FIRST_TOKENS], "<i4").tobytes()
    return hashlib.blake2b(first, digest_size=KEY_BYTES).hexdigest()
