"""The policies that are compared, and the suites of shapes, traces and memory sizes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

from bench.managers.theirs import PEER_SHAPES
from bench.replay.shapes import PLANNED_BYTES, Shape, read_shape
from bench.result_file import REPOSITORY
from kvell.engine.requests.limits import Limits
from kvell.memory import GroupKind, LayerSpec, Manager, longest_request, plan_layout, request_bytes
from kvell.simulator.traces.generators import generate_trace
from kvell.simulator.traces.rows import TraceRow, ideal_hit_tokens
from kvell.simulator.traces.trace import read_trace

POLICIES: dict[str, tuple[str, ...]] = {
    "kvell": (),
    "kvell-hazard": ("--eviction", "hazard"),
    "kvell-common": ("--common-pool",),
    **{name: ("--manager", name) for name in ("jenga", "paged", "max-page", "static")},
}
"""Flags of ``kvell replay`` for each policy of Kvell's."""
VLLM: dict[str, int | None] = {"vllm": 0, "vllm-dense": None}
"""``prefix_cache_retention_interval`` for each policy of vLLM's own manager."""
DIVISIONS = ("kvell", "jenga", "paged", "max-page", "static")
"""Policies that divide memory differently and evict by LRU."""
SHAPES = tuple(sorted(path.stem for path in (REPOSITORY / "bench/configs").glob("*.json")))
"""All of ``bench/configs`` but the draft models and those larger than a card."""
CONVERSATIONS, CODE = "azure-2023-conv", "azure-2023-code"
MOONCAKE, CODING = "mooncake-conversation", "coding-assistant"
ROOMY: tuple[Manager, ...] = ("paged", "kvell")
"""Memory in mean requests holds the longest request under these managers."""
UNHELD = ("--ignore-sessions",)
"""vLLM's side has no sessions, so turns are not held back for their answers."""
AMPLE, AMPLE_GIB = "ample", 4096
FULL, FULL_POOL = "full", 4
"""A full pool is this multiple of what running requests need on average in an ample one."""


@dataclass(frozen=True)
class Case:
    """One shape, trace and memory size, on which policies are compared.

    :param requests: the first of the trace.
    :param memory: ``24GiB``; ``8x``, in mean requests; ``ample``; or ``full``.
    :param seed: of a generated trace.
    :param flags: further flags of ``kvell replay``.
    """

    shape: str
    trace: str
    requests: int
    memory: str
    seed: int = 0
    flags: tuple[str, ...] = UNHELD

    @property
    def name(self) -> str:
        """The name of the case in tables and files."""
        seed = f"#{self.seed}" if self.seed else ""
        flags = "".join(f" {flag}" for flag in self.flags if flag not in UNHELD)
        return f"{self.shape} {self.trace}{seed} {self.memory}{flags}"


@dataclass(frozen=True)
class Suite:
    """Cases and the policies that replay each of them."""

    cases: tuple[Case, ...]
    policies: tuple[str, ...]

    def cells(self) -> Iterator[tuple[Case, str]]:
        """Yield every case with each policy; the policies of a case follow one another."""
        for case, policy in product(self.cases, self.policies):
            if policy not in VLLM or case.shape in PEER_SHAPES:
                yield case, policy


MATRIX_TRACES = {CODE: 1000, "mooncake-synthetic": 500, CONVERSATIONS: 1000} | {
    MOONCAKE: 500,
    CODING: 300,
}
PEERS = {
    CONVERSATIONS: (1000, (16, 24, 16, 4, 24, 3, 6, 6)),
    MOONCAKE: (500, (40, 32, 40, 12, 24, 6, 12, 16)),
}
"""Requests, and GiB of memory for each of :data:`PEER_SHAPES`."""
ARTICLES, ARTICLE_REQUESTS = "arxiv-qa", 100
ARTICLE_GIB, MOONCAKE_GIB = (56, 64, 72, 80, 96, 112, 128, 160), (256, 384, 512, 768, 1024, 2048)
ONE_AT_A_TIME = ("--max-num-seqs", "1")
WINDOWS = "gemma3-27b"
"""The shape on which one LRU over all layers is compared with one that knows their windows."""

SUITES = {
    "matrix": Suite(
        tuple(
            Case(shape, trace, count, f"{size}x")
            for (trace, count), shape, size in product(MATRIX_TRACES.items(), SHAPES, (8, 16, 32))
        ),
        (*DIVISIONS, *VLLM),
    ),
    "peers": Suite(
        tuple(
            Case(shape, trace, count, f"{gib}GiB")
            for trace, (count, sizes) in PEERS.items()
            for shape, gib in zip(PEER_SHAPES, sizes, strict=True)
        ),
        ("kvell", "vllm"),
    ),
    "packing": Suite(
        tuple(
            Case("ministral-8b", "ministral-static", 20, f"{gib}GiB", seed)
            for gib, seed in product((24, 40, 60), range(10))
        ),
        DIVISIONS,
    ),
    "hits": Suite(
        tuple(
            Case(shape, trace, count, memory, 1, ())
            for shape in PEER_SHAPES
            for trace, count in ((MOONCAKE, 600), (CODING, 300), ("tree", 600))
            for memory in (AMPLE, FULL)
        ),
        ("kvell", "kvell-hazard"),
    ),
    "prefixes": Suite(
        (
            *(
                Case(WINDOWS, ARTICLES, ARTICLE_REQUESTS, f"{gib}GiB", flags=(*UNHELD, *flags))
                for flags, gib in product((ONE_AT_A_TIME, ()), ARTICLE_GIB)
            ),
            *(Case(WINDOWS, MOONCAKE, 1000, f"{gib}GiB") for gib in MOONCAKE_GIB),
        ),
        ("paged", "kvell", "kvell-common"),
    ),
}


def trace_file(traces: Path, name: str) -> Path | None:
    """Return the file of a recorded trace, or None for a generated one."""
    path = traces / f"{name}.jsonl.gz"
    return path if path.exists() else None


@cache
def rows_of(case: Case, traces: Path) -> list[TraceRow]:
    """Return the requests of a case."""
    path = trace_file(traces, case.trace)
    if path is None:
        return generate_trace(case.trace, case.requests, case.seed)
    return read_trace(path, case.requests)


def endless_hit_rate(rows: Sequence[TraceRow]) -> float:
    """Return the hit rate of a cache that never evicts."""
    return ideal_hit_tokens(rows) / sum(row.prompt_tokens for row in rows)


def memory_flag(case: Case, traces: Path) -> str:
    """Return the memory of a case as ``--kv-memory`` takes it; not of a full pool."""
    if case.memory == AMPLE:
        return f"{AMPLE_GIB}GiB"
    if case.memory.endswith("x"):
        size = int(case.memory.removesuffix("x"))
        return f"{memory_bytes(read_shape(case.shape), rows_of(case, traces), size)}B"
    return case.memory


def memory_bytes(shape: Shape, rows: Sequence[TraceRow], size: int) -> int:
    """Return the bytes of ``size`` mean requests under ``paged``, at least of the longest request.

    A request is counted at its last token, in whole pages, padding included.
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
    """Return the kinds of layers that hold bytes when no request has an image, sorted."""
    held = {layer.kind for layer in shape.description.layers} - {GroupKind.VISION}
    return sorted(kind.value for kind in held)
