"""Cases of the pressure benches: request lengths, and pools too small for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvell.engine.requests.limits import Limits
from kvell.memory import LayerSpec, plan_layout, request_bytes

WANTED = 16
"""Requests that may decode at once."""
HELD = 4
"""Requests that a pressed pool holds under one page size for all layers: a quarter."""
EASE = 1.5
"""An ample pool has this multiple of what all wanted requests take."""


@dataclass(frozen=True)
class Case:
    """Requests that all wait at the start and share nothing.

    :param prompt_tokens: shortest and longest; uniform between them.
    :param output_tokens: of each.
    :param why: where these lengths come from.
    """

    shape: str
    prompt_tokens: tuple[int, int]
    output_tokens: int
    requests: int
    why: str = ""

    def prompts(self, seed: int) -> list[int]:
        """Lengths of a round."""
        draw = np.random.default_rng(seed)
        return [int(n) for n in draw.integers(*self.prompt_tokens, self.requests, endpoint=True)]

    @property
    def mean_tokens(self) -> int:
        """Mean length of a request at its last token."""
        return sum(self.prompt_tokens) // 2 + self.output_tokens

    @property
    def most_tokens(self) -> int:
        """Length of the longest request at its last token."""
        return self.prompt_tokens[1] + self.output_tokens


def pool_bytes(layers: Sequence[LayerSpec], case: Case, requests: float) -> int:
    """Bytes for ``requests`` mean requests under ``paged``, in whole pages of that layout."""
    least = request_bytes(plan_layout(layers, 1 << 50, manager="paged"), case.mean_tokens)
    wanted = int(requests * least)
    layout = plan_layout(layers, wanted, manager="paged")
    each = request_bytes(layout, case.mean_tokens, Limits().min_chunk_tokens)
    large = layout.large_page_bytes
    return -(-int(requests * each) // large) * large


def pressed_bytes(layers: Sequence[LayerSpec], case: Case) -> int:
    """Bytes of a pool for a quarter of the wanted batch under ``paged``."""
    return pool_bytes(layers, case, HELD)


def ample_bytes(layers: Sequence[LayerSpec], case: Case) -> int:
    """Bytes of a pool in which no request waits for memory, under either manager."""
    return pool_bytes(layers, case, EASE * WANTED)
