"""Two rates of the machine: of one matrix product, and of a copy."""

from collections.abc import Callable

import torch

from kvell.clock import Clock

ROWS = 512


TRIES = 7


COPY_BYTES = 64 << 20


SHORTEST_SECONDS = 1e-9


def product_flops_per_second(
    clock: Clock, inner: int, outer: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Profile one compute-bound operator, which stands for all: N of MemServe §5.3.2.

    :returns: the best of several [512, inner] × [inner, outer].
    """
    rows = torch.ones((ROWS, inner), dtype=dtype, device=device)
    weight = torch.ones((outer, inner), dtype=dtype, device=device)
    seconds = _best(clock, lambda: torch.nn.functional.linear(rows, weight), device)
    return 2.0 * ROWS * inner * outer / seconds


def copy_bytes_per_second(
    clock: Clock, device: torch.device, size_bytes: int = COPY_BYTES
) -> float:
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    return size_bytes / _best(clock, lambda: target.copy_(source), device)


def _best(clock: Clock, work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = clock.now_seconds()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, max(SHORTEST_SECONDS, clock.now_seconds() - started))
    return best
