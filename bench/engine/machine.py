"""The machine's own figures, measured beside every comparison."""

import platform
import time

import torch


def read_bandwidth_gb_per_second(size_bytes: int = 512 << 20, rounds: int = 5) -> float:
    """Best of several sums over a buffer that no cache holds, GB/s."""
    data = torch.ones(size_bytes // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        data.sum()
        best = max(best, size_bytes / (time.perf_counter() - start) / 1e9)
    return best


def describe() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "read_bandwidth_gb_per_second": round(read_bandwidth_gb_per_second(), 1),
    }
