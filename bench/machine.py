"""The machine's own limits, measured in every comparison: figures are given as shares of them."""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 5
FAR_BYTES = 512 << 20
"""Larger than any cache."""
GEMM_SIZE = 2048
PROBE_SIZE = 256
"""Rows, width and columns: large enough to be bound by arithmetic."""


@dataclass(frozen=True)
class Roofline:
    """Best rates that this run of the bench saw, with torch's threads.

    :param read_bytes_per_second: a plain sum over memory far larger than the caches.
    :param gemm_flops_per_second: a square product in bfloat16, or in float32 where that is
        faster; a multiply and add is two.
    """

    read_bytes_per_second: float
    gemm_flops_per_second: float

    def decode_tokens_per_second(self, weight_bytes: int, batch: int, kv_bytes: float) -> float:
        """Tokens per second if a step did nothing but read weights once and each request's KV.

        :param kv_bytes: of one request, mean over its decode.
        """
        return batch * self.read_bytes_per_second / (weight_bytes + batch * kv_bytes)

    def prefill_tokens_per_second(self, parameters: int) -> float:
        """Prompt tokens per second if nothing but the linears' arithmetic took time."""
        return self.gemm_flops_per_second / (2 * parameters)


Clock = Callable[[], float]
"""In seconds. A thread's own clock excludes time that neighbours on a shared machine took."""
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}


def add_clock_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--threads`` and ``--clock``, for :func:`chosen_clock`."""
    parser.add_argument("--threads", type=int, default=0, help="0: OpenMP's number")
    parser.add_argument("--clock", default="wall", choices=tuple(CLOCKS))


def chosen_clock(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Clock:
    """Return the clock asked for, and set torch's number of threads."""
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu sees one thread only: use --threads 1")
    if options.threads:
        torch.set_num_threads(options.threads)
    return CLOCKS[options.clock]


def read_bandwidth(
    rounds: int = ROUNDS, size_bytes: int = FAR_BYTES, clock: Clock = time.perf_counter
) -> float:
    """Bytes per second, best of ``rounds``; with torch's threads."""
    return read_rate(torch.ones(size_bytes // 4, dtype=torch.float32), rounds, clock)


def read_rate(words: torch.Tensor, rounds: int = ROUNDS, clock: Clock = time.perf_counter) -> float:
    """Bytes per second of summing ``words`` (float32), best of ``rounds``."""
    return words.nbytes / best_seconds(words.sum, rounds, clock)


def gemm_rate(
    dtype: torch.dtype = torch.bfloat16,
    rounds: int = ROUNDS,
    size: int = GEMM_SIZE,
    clock: Clock = time.perf_counter,
) -> float:
    """Floating-point operations per second of a square product, best of ``rounds``."""
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right, rounds, clock)


def measured_roofline(rounds: int = ROUNDS) -> Roofline:
    """Measure both limits now."""
    return Roofline(read_bandwidth(rounds), gemm_rate(faster_dtype(), rounds))


def faster_dtype() -> torch.dtype:
    """The one that products are faster in.

    Without instructions for bfloat16 torch multiplies it thousands of times slower than float32,
    which is what kernels compute in there.
    """
    return max((torch.bfloat16, torch.float32), key=lambda one: gemm_rate(one, 1, PROBE_SIZE))


def best_of(rooflines: list[Roofline]) -> Roofline:
    """The best rates of several moments: a limit is what the machine can do undisturbed."""
    return Roofline(
        max(one.read_bytes_per_second for one in rooflines),
        max(one.gemm_flops_per_second for one in rooflines),
    )


def middle_of(rooflines: list[Roofline]) -> Roofline:
    """The medians of several moments: the usual rates, neighbours on the host included."""
    return Roofline(
        statistics.median(one.read_bytes_per_second for one in rooflines),
        statistics.median(one.gemm_flops_per_second for one in rooflines),
    )


def best_seconds(
    work: Callable[[], object], rounds: int, clock: Clock = time.perf_counter
) -> float:
    """The fastest of ``rounds`` calls, after one that warms up."""
    work()
    best = float("inf")
    for _ in range(rounds):
        begin = clock()
        work()
        best = min(best, clock() - begin)
    return best


def read_bandwidth_gb_per_second(clock: Clock = time.perf_counter) -> float:
    """Read bandwidth in GB/s, as it is printed."""
    return read_bandwidth(clock=clock) / 1e9


def describe(clock: Clock = time.perf_counter) -> dict[str, object]:
    """The machine that the figures were measured on: architecture, threads, torch, bandwidth."""
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "read_bandwidth_gb_per_second": round(read_bandwidth_gb_per_second(clock), 1),
    }
