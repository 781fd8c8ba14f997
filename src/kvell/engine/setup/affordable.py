"""Checks that the machine has enough memory, before anything is reserved.

Memory is committed at its first touch, so a pool of any size can be reserved.  A pool that exceeds
the machine's memory would end in the kernel's out-of-memory killer.
"""

from kvell.byte_sizes import typed_bytes
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.vocabulary import MIB


def check_affordable(
    options: EngineOptions, pool_bytes: int, reserve_bytes: int, free_bytes: int, host_bytes: int
) -> None:
    """Check a KV pool, its reserve and a CPU buffer against free memory; weights are loaded.

    :param pool_bytes: size of the pool to reserve.
    :param reserve_bytes: reserve for activations outside the pool.
    :param free_bytes: free memory of the device that holds the pool.
    :param host_bytes: free host memory; equal to ``free_bytes`` on a CPU.
    :raises ChangeSomething: naming the flag, and the largest value that fits.
    """
    if pool_bytes + reserve_bytes > free_bytes:
        raise too_much("--kv-memory", pool_bytes, free_bytes, reserve_bytes)
    check_buffer(options, host_bytes - (pool_bytes + reserve_bytes))


def check_buffer(options: EngineOptions, left_bytes: int) -> None:
    """Check a CPU buffer against the host memory that remains after the pool.

    :raises ChangeSomething: naming the largest buffer that fits.
    """
    if options.cpu_buffer_bytes and options.cpu_buffer_bytes > left_bytes:
        raise too_much("--cpu-buffer", options.cpu_buffer_bytes, left_bytes, 0)


def too_much(flag: str, value: int, free_bytes: int, beside_bytes: int) -> ChangeSomething:
    """Return the error for a size that is more than the machine has free.

    :param beside_bytes: memory for activations, which the size does not include.
    """
    beside = f" after {-(-beside_bytes // MIB):,} MiB for activations" * bool(beside_bytes)
    most_mib = (free_bytes - beside_bytes) // MIB
    return ChangeSomething(
        flag,
        typed_bytes(value),
        f"is more than the machine has free{beside}: {max(0, free_bytes) // MIB:,} MiB",
        f"use at most {flag} {most_mib}MiB" if most_mib > 0 else "leave it out, or free memory",
    )
