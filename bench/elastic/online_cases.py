"""Cases of the online benches: workloads, machines short of memory, ways to divide it (eLLM §6).

See README.md beside this file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import result_file

CHUNKED_TOKENS = 512
SLACK = 25
"""Objectives are this multiple of the latencies of a request alone."""
ATTAINMENT = 0.9
"""Goodput is the highest rate at which this part of the requests meets both objectives."""
MODEL_TOKENS = 262_144
"""Context of the paper's model, Llama-3-8B-262K, and so of its server (eLLM §3.2, §6.1)."""
BUFFER_GIB = 119.0
"""One card's part of the paper's host, which has 1 TB for eight."""
HALF_A_HOST_GIB = 512.0
"""Half of a 1 TB host with one card: prompts of 32K fill a card's part of the paper's host."""


@dataclass(frozen=True)
class Case:
    """A shape, memory for KV and activations together, a workload, and the rates to try.

    :param requests: number of requests, from an empty server to the last answer.
    :param rates: requests per second, rising.
    :param buffer_gib: of host memory, for the sides that have a buffer.
    :param hardware: a profile's name.
    :param context_tokens: most tokens of a request.
    """

    shape: str
    memory_gib: float
    workload: str
    requests: int
    rates: tuple[float, ...]
    buffer_gib: float = BUFFER_GIB
    hardware: str = "a100-80"
    context_tokens: int = MODEL_TOKENS


def rising(first: float, count: int = 16, factor: float = 1.15) -> tuple[float, ...]:
    """Rates, each 15 % above the one before."""
    return tuple(first * factor**n for n in range(count))


CASES = (
    Case("llama3-8b", 57, "2k-2k", 200, rising(0.8)),
    Case("llama3-8b", 57, "32k-2k", 100, rising(0.04)),
    Case("llama3-8b", 57, "sharegpt-like", 600, rising(6.0)),
    Case("llama3-8b", 57, "32k-2k", 100, rising(0.04), HALF_A_HOST_GIB),
    Case("llama3-8b", 5, "sharegpt-like", 600, rising(0.2), 32.0, "l4", 8_192),
)
"""57 GiB: what the weights leave of 90 % of an 80 GB card; 5 GiB: of a 24 GB card, for which the
last case is scaled: the model's first context, host memory in proportion."""


@dataclass(frozen=True)
class Side:
    """A way to divide memory.

    :param shares: KV cache and activations share one pool; else activations have a reserve.
    :param buffers: preempted requests go to host memory, and prompts ahead of decodes.
    :param fixed_gib: fixed logical size of the buffer; None: set by Algorithm 2.
    :param batched_tokens: most tokens of a step; None: the longest prompt that is served.
    :param stages: prompts may be computed into the buffer (eLLM §4.3.2).
    """

    name: str
    shares: bool = False
    buffers: bool = False
    batched_tokens: int | None = None
    fixed_gib: float | None = None
    stages: bool = False


STATIC, CHUNKED, BUFFER, INTRA, BOTH, STAGED = (
    Side("static"),
    Side("static, chunks of 512", batched_tokens=CHUNKED_TOKENS),
    Side("buffer only", buffers=True),
    Side("intra only", shares=True),
    Side("both", shares=True, buffers=True),
    Side("both, prompts into the buffer", shares=True, buffers=True, stages=True),
)
SIDES = (STATIC, CHUNKED, BOTH, BUFFER, INTRA, STAGED)
"""Those whose goodput is compared, and the ablation."""


def mean_of(draws: Sequence[Any]) -> Any:
    """The mean of each figure, recursively; None where a draw lacks it."""
    if isinstance(draws[0], dict):
        return {name: mean_of([draw[name] for draw in draws]) for name in draws[0]}
    return None if None in draws else sum(draws) / len(draws)


def write_part(
    whole: str, part: str, found: Any, path: Path, *, processor: str | None = None
) -> None:
    """Write one case or workload into the file of all; keep the others in it.

    The file's ``run`` is then that of the part written last.
    """
    kept = json.loads(path.read_text())[whole] if path.exists() else {}
    parts = dict(sorted((kept | {part: found}).items()))
    result_file.write(path, {whole: parts}, processor=processor)
