"""The cells of the matrix: every shape × trace × memory size, and the managers in each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.managers.theirs import PEER_SHAPES
from bench.replay.shapes import PLANNED_BYTES, Shape
from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, LayerSpec, Manager, longest_request, plan_layout, request_bytes
from kvell.simulator.traces.rows import TraceRow

SHAPES = (
    "deepseek-v2-lite",
    "falcon-h1-7b",
    "gemma2-9b",
    "gemma3-27b",
    "gemma3n-e4b",
    "gpt-oss-20b",
    "jamba-mini",
    "kimi-linear-48b",
    "lfm2-1.2b",
    "llama-3.2-11b-vision",
    "llama3-8b",
    "llama4-scout",
    "llava-onevision-7b",
    "ministral-8b",
    "nemotron-h-8b",
    "paligemma2-10b",
    "qwen2.5-vl-7b",
    "qwen3-8b",
    "qwen3-next",
    "zamba2-7b",
)
"""All of ``bench/configs`` but the draft models and those larger than a card."""
TRACES = {
    "azure-2023-code": 1000,
    "mooncake-synthetic": 500,
    "azure-2023-conv": 1000,
    "mooncake-conversation": 500,
    "coding-assistant": 300,
}
"""Requests of each trace; the fastest to replay first."""
SIZES = (8, 16, 32)
"""Memory sizes, in mean requests."""
OURS: tuple[Manager, ...] = ("kvell", "jenga", "paged", "max-page", "static")
VLLM = {"vllm": 0, "vllm-dense": None}
"""vLLM's two settings of ``prefix_cache_retention_interval``."""
IDEAL = "ideal"
"""A packer without pages, as a bound; only on traces without reuse, since it caches nothing."""
ROOMY: tuple[Manager, ...] = ("paged", "kvell")
"""Every cell's memory holds the longest request under these managers."""
WITHOUT_REUSE = ("azure-2023-code", "azure-2023-conv")
MANAGERS = (*OURS, *VLLM, IDEAL)
IMAGE_KINDS = frozenset({GroupKind.VISION})
"""Kinds that hold nothing while there are no images."""


@dataclass(frozen=True, order=True)
class Cell:
    """One replay.

    :param size: memory in mean requests.
    """

    shape: str
    trace: str
    size: int
    manager: str

    @property
    def name(self) -> str:
        """The cell's name, for files and messages."""
        return ".".join((self.shape, self.trace, str(self.size), self.manager))

    @property
    def place(self) -> tuple[str, str, int]:
        """Shape, trace and size, which all managers of a comparison share."""
        return self.shape, self.trace, self.size


def cells(
    shapes: Sequence[str] = (),
    traces: Sequence[str] = (),
    sizes: Sequence[int] = (),
    managers: Sequence[str] = (),
) -> Iterator[Cell]:
    """All cells that pass every filter; an empty filter passes all.  Comparisons stay together."""
    for trace in (one for one in TRACES if one in (traces or TRACES)):
        for shape in (one for one in SHAPES if one in (shapes or SHAPES)):
            for size in (one for one in SIZES if one in (sizes or SIZES)):
                for manager in (one for one in MANAGERS if one in (managers or MANAGERS)):
                    if _is_asked(manager, shape, trace):
                        yield Cell(shape, trace, size, manager)


def _is_asked(manager: str, shape: str, trace: str) -> bool:
    if manager == IDEAL:
        return trace in WITHOUT_REUSE
    return manager in OURS or shape in PEER_SHAPES


def memory_bytes(shape: Shape, rows: Sequence[TraceRow], size: int) -> int:
    """Bytes of ``size`` mean requests under ``paged``, and at least of the longest request.

    A request is counted at its last token, in whole pages, padding included.  The longest fits
    under both ``paged`` and ``kvell``, whose pages are padded differently.
    """
    layers, limits = shape.description.layers, Limits()
    layout = plan_layout(layers, PLANNED_BYTES, manager="paged")
    each = [request_bytes(layout, row.num_tokens, limits.min_chunk_tokens) for row in rows]
    least = int(size * mean(each))
    longest = max(row.num_tokens for row in rows)
    for manager in ROOMY:
        while not _holds(layers, manager, least, longest, limits.min_chunk_tokens):
            least += layout.large_page_bytes
    return least


def _holds(
    layers: Sequence[LayerSpec], manager: Manager, pool_bytes: int, tokens: int, chunk_tokens: int
) -> bool:
    layout = plan_layout(layers, pool_bytes, manager=manager)
    return longest_request(layout, tokens, chunk_tokens) >= tokens


def kinds(shape: Shape) -> list[str]:
    """Kinds of layers that hold bytes when no request has an image; sorted."""
    found = {layer.kind for layer in shape.description.layers} - IMAGE_KINDS
    return sorted(kind.value for kind in found)


def is_refused(outcome: Mapping[str, Any]) -> bool:
    """Whether the manager refused to run this cell at all."""
    return "refused" in outcome
