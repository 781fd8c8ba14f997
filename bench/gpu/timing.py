"""Timing on the GPU: medians by events, caches cold."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of several, and the best."""

    median: float
    best: float


def timed(calls: Sequence[Callable[[], object]], seconds: float = 0.15) -> Timing:
    """Time the calls in turn, each over memory of its own, so that no cache helps.

    The calls of a round are queued behind one another, so launches overlap with the round;
    a round counts as its duration divided by its calls.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = _round(calls)
    rounds = max(5, min(60, int(seconds / max(once * len(calls), 1e-6))))
    times = [_round(calls) for _ in range(rounds)]
    return Timing(statistics.median(times), min(times))


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a captured graph: its launches then cost the host nothing."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _round(calls: Sequence[Callable[[], object]]) -> float:
    begin, end = _event(), _event()
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(calls)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bandwidth(size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / timed([lambda: target.copy_(source)]).median


def read_bandwidth(size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a plain sum over memory far larger than the caches."""
    words = torch.randint(0, 9, (size_bytes // 4,), dtype=torch.int32, device="cuda").view(
        torch.float32
    )
    return size_bytes / timed([words.sum]).median
