"""Holders: who references pages. A running request is one; so is a lease.

A lease::

    open(lease_until) ──► LEASED ──claim──► REQUEST ──close──► gone
                            │ expire(step)
                            └──────────────► gone
"""

from dataclasses import dataclass, field

import numpy as np

from kvell.prefix.radix import Node, Tokens


@dataclass
class GroupPages:
    """A holder's pages in one group: positions ``first … first+len(pages)-1``."""

    first: int
    pages: list[int]

    @property
    def end(self) -> int:
        """Page position after the last one held."""
        return self.first + len(self.pages)


@dataclass
class Holder:
    """Tokens, how many of them are computed, and the pages that hold them."""

    handle: int
    root: str
    prompt: Tokens
    node: Node
    groups: list[GroupPages]
    hit_tokens: int
    computed: int
    published: int
    expected_tokens: int
    lease_until: int | None
    generated: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.prompt) + len(self.generated)

    def tokens_to(self, end: int) -> Tokens:
        """The first ``end`` tokens, int32."""
        if end <= len(self.prompt):
            return self.prompt[:end]
        tail = np.asarray(self.generated[: end - len(self.prompt)], np.int32)
        return np.concatenate([self.prompt, tail])
