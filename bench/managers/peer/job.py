"""What a peer is asked to replay: plain data, which both sides of the pipe know."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["full", "sliding", "chunked", "state"]


@dataclass(frozen=True)
class PeerLayer:
    """One layer; keys and values are two tensors of 2-byte elements.

    :param window_tokens: of a sliding layer its window, of a chunked one its chunk.
    :param state_bytes: of a state layer; the other sizes are 0 then.
    """

    kind: Kind
    kv_heads: int
    head_size: int
    window_tokens: int = 0
    state_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.kv_heads * self.head_size * 2


@dataclass(frozen=True)
class PeerJob:
    """One replay.

    :param checkpoints_in_chunks: vLLM's backend for these states writes checkpoints inside a
        chunk (Mamba 2).
    :param trace: path of a file of JSON lines, gzipped or not.
    :param limit: requests of the trace at most.
    :param retention_tokens: vLLM's ``prefix_cache_retention_interval``: 0 is its default, which
        keeps what sliding windows and states need at the end of a prompt; None keeps all of it.
    :param sample_every: steps between two looks at the pool (0: none, and no waste is told).
    """

    shape: str
    layers: tuple[PeerLayer, ...]
    checkpoints_in_chunks: bool
    trace: str
    limit: int
    memory_bytes: int
    retention_tokens: int | None = 0
    sample_every: int = 8
    max_batched_tokens: int = 8192
    max_running: int = 256
    block_tokens: int = 16

    def line(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"


def job_from(line: str) -> PeerJob:
    """The job of such a line.

    :raises TypeError: if it has other fields.
    """
    raw: dict[str, Any] = json.loads(line)
    raw["layers"] = tuple(PeerLayer(**each) for each in raw["layers"])
    return PeerJob(**raw)


def kinds_of(layers: tuple[PeerLayer, ...]) -> Iterator[tuple[str, PeerLayer]]:
    """Every layer by the name that it has in a peer."""
    return ((f"layer.{index}", layer) for index, layer in enumerate(layers))
