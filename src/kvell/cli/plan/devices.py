"""The requests that fit on GPUs, after a model's weights and a step's activations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.pages.layout import Layout
from kvell.prefix.groups.capacity import longest_request, requests_that_fit

GB = 10**9
DEVICES_BYTES = (24 * GB, 80 * GB, 141 * GB)
"""The memory of common GPUs, as vendors count it, for plans without ``--gpu-memory``."""


@dataclass(frozen=True)
class DeviceFit:
    """The KV memory and requests that fit on one GPU.

    :param kv_memory_bytes: pool that ``generate`` and ``serve`` would allocate: a share of the
        memory after weights and a step; 0 if it is less than a page per group.
    :param requests: number of requests that decode together, for each length in the report.
    """

    memory_bytes: int
    kv_memory_bytes: int
    large_page_bytes: int
    sizing_rule: str
    longest_request_tokens: int
    requests: tuple[int, ...]


def device_fit(
    memory_bytes: int,
    taken_bytes: int,
    kv_share: float,
    layout_of: Callable[[int], Layout],
    lengths_tokens: Sequence[int],
) -> DeviceFit:
    """Compute the requests that fit on a GPU.

    :param taken_bytes: weights, and activations of the largest step.
    :param kv_share: part of the rest that becomes the pool.
    :param layout_of: returns the model's layout over a pool of a given number of bytes.
    :param lengths_tokens: lengths of requests, ascending; the last is the model's longest.
    """
    pool_bytes = int((memory_bytes - taken_bytes) * kv_share)
    try:
        layout = layout_of(pool_bytes) if pool_bytes > 0 else None
    except ChangeSomething:  # less than a page for every group
        layout = None
    if layout is None:
        return DeviceFit(memory_bytes, 0, 0, "", 0, tuple(0 for _ in lengths_tokens))
    return DeviceFit(
        memory_bytes,
        layout.pool_bytes,
        layout.large_page_bytes,
        layout.sizing_rule,
        longest_request(layout, lengths_tokens[-1], Limits().min_chunk_tokens),
        tuple(requests_that_fit(layout, tokens) for tokens in lengths_tokens),
    )
