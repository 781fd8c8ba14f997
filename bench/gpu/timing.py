"""Timing: medians by events, caches cold."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.gpu.place import Place


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of several, and the best."""

    median: float
    best: float


def timed(place: Place, calls: Sequence[Callable[[], object]], seconds: float = 0.15) -> Timing:
    """Time the calls in turn, each over memory of its own, so that no cache helps.

    The calls of a round are queued behind one another, so launches overlap with the round;
    a round counts as its duration divided by its calls.
    """
    if place.pretends:  # the interpreter is slow, and its time says nothing
        once = _round(place, calls)
        return Timing(once, once)
    for call in calls:
        call()
    place.wait()
    once = _round(place, calls)
    rounds = max(5, min(60, int(seconds / max(once * len(calls), 1e-6))))
    times = [_round(place, calls) for _ in range(rounds)]
    return Timing(statistics.median(times), min(times))


def host_seconds(place: Place, call: Callable[[], object], calls: int = 200) -> float:
    """Return how long a call keeps the host: fewer calls than a GPU's queue takes, no wait."""
    rounds, calls = (1, 1) if place.pretends else (7, calls)
    times = []
    for _ in range(rounds):
        call()
        place.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls)
    place.wait()
    return statistics.median(times)


def graphed(place: Place, call: Callable[[], object]) -> Callable[[], object]:
    """Return the call as a captured graph: its launches then cost the host nothing."""
    if place.pretends:
        return call
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _round(place: Place, calls: Sequence[Callable[[], object]]) -> float:
    if place.pretends:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    begin, end = _event(), _event()
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(calls)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_bandwidth(place: Place, size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * size_bytes / timed(place, [lambda: target.copy_(source)]).median


def read_bandwidth(place: Place, size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a plain sum over memory far larger than the caches."""
    shape = (size_bytes // 4,)
    words = torch.randint(0, 9, shape, dtype=torch.int32, device=place.device).view(torch.float32)
    return size_bytes / timed(place, [words.sum]).median


def product_rate(place: Place, size: int = 8192) -> float:
    """FLOP per second of a product of square matrices of random numbers in bfloat16."""
    left, right = (
        torch.randn(size, size, dtype=torch.bfloat16, device=place.device) for _ in range(2)
    )
    return 2 * size**3 / timed(place, [lambda: left @ right]).median
