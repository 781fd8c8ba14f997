"""Helpers of the trace generators: new ids, arrivals, keyed random numbers."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvell.simulator.traces.rows import BlockIds, TraceRow

Draw = np.random.Generator
Seconds = npt.NDArray[np.float64]
REQUESTS_PER_SECOND = 5.0


class NewIds:
    """Source of block ids that were not used before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> BlockIds:
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64)


def poisson_arrivals(draw: Draw, count: int) -> Seconds:
    arrivals = np.cumsum(draw.exponential(1 / REQUESTS_PER_SECOND, count))
    return arrivals - arrivals[0] if count else arrivals


def draw_unrelated(arrivals: Seconds, prompts: BlockIds, outputs: BlockIds) -> list[TraceRow]:
    return [
        TraceRow(float(at), int(prompt), int(output))
        for at, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]


def draw_related(
    arrivals: Seconds,
    prompts: BlockIds,
    outputs: BlockIds,
    texts: Sequence[BlockIds],
    block_tokens: int,
) -> list[TraceRow]:
    """Return requests whose prompts begin with these texts, given as ids of blocks."""
    rows = draw_unrelated(arrivals, prompts, outputs)
    named = zip(rows, texts, strict=True)
    return [replace(row, block_ids=ids, block_tokens=block_tokens) for row, ids in named]


def keyed_fraction(*key: int) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the key alone."""
    data = b"".join(part.to_bytes(8, "little", signed=True) for part in key)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") / 2**64
