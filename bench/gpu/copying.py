"""Copies of many pages in one launch, to see what a GPU gives: pool to buffer, and back."""

import torch
import triton
import triton.language as tl

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_BLOCK_WORDS = 1024


def copy_pages(
    target: torch.Tensor,
    target_starts_bytes: torch.Tensor,
    source: torch.Tensor,
    source_starts_bytes: torch.Tensor,
    page_bytes: int,
    alignment_bytes: int,
) -> None:
    """Copy ``page_bytes`` from every source start to the target start at the same index.

    Targets may not overlap each other or any source.

    :param target: flat uint8, like ``source``; both are on one device and may be the same tensor.
    :param target_starts_bytes: int64 [n] on that device, like ``source_starts_bytes``.
    :param alignment_bytes: a divisor of all starts; it limits the copied words (up to 8 bytes).
    :raises ValueError: if a tensor has the wrong dtype or length.
    """
    starts = (target_starts_bytes, source_starts_bytes)
    if any(each.dtype != torch.int64 or each.dim() != 1 for each in starts):
        raise ValueError("starts: must be flat int64")
    if len(starts[0]) != len(starts[1]):
        raise ValueError(f"starts: {len(starts[0])} targets for {len(starts[1])} sources")
    for name, tensor in (("target", target), ("source", source)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: must be flat uint8")
    if not len(target_starts_bytes) or not page_bytes:
        return
    addresses = (target.data_ptr(), source.data_ptr(), page_bytes, alignment_bytes)
    size = next(size for size in _WORDS if not any(number % size for number in addresses))
    words = page_bytes // size
    copy_runs[(len(target_starts_bytes), triton.cdiv(words, _BLOCK_WORDS))](
        _as_words(target, size),
        _as_words(source, size),
        target_starts_bytes // size,
        source_starts_bytes // size,
        words,
        BLOCK=_BLOCK_WORDS,
    )


def _as_words(memory: torch.Tensor, size: int) -> torch.Tensor:
    return memory[: memory.numel() // size * size].view(_WORDS[size])


@triton.jit
def copy_runs(
    target,
    source,
    target_starts,
    source_starts,
    length,
    BLOCK: tl.constexpr,
):
    """Copy ``length`` numbers from each source to its target.  Grid (runs, blocks of a run)."""
    run = tl.program_id(0)
    to = target + tl.load(target_starts + run)
    place = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < length
    tl.store(to + place, tl.load(source + tl.load(source_starts + run) + place, mask=there), there)
