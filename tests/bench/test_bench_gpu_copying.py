"""Copies of pages in one launch, by Triton's interpreter."""

import pytest
import torch

from bench.gpu.copying import copy_pages


@pytest.mark.parametrize("page_bytes", [4096, 1000, 6, 7])
def test_pages_are_gathered_and_scattered(page_bytes: int) -> None:
    generator = torch.Generator().manual_seed(page_bytes)
    pool = torch.randint(0, 256, (9, page_bytes), dtype=torch.uint8, generator=generator)
    pages = torch.tensor([7, 0, 3])
    buffer, places = torch.zeros(3, page_bytes, dtype=torch.uint8), torch.arange(3) * page_bytes
    sources = pages * page_bytes
    copy_pages(buffer.view(-1), places, pool.view(-1), sources, page_bytes, page_bytes)
    assert torch.equal(buffer, pool[pages])
    other = torch.zeros_like(pool)
    copy_pages(other.view(-1), sources, buffer.view(-1), places, page_bytes, page_bytes)
    expected = torch.zeros_like(pool)
    expected[pages] = pool[pages]
    assert torch.equal(other, expected)


def test_copying_nothing_touches_nothing() -> None:
    pool, none = torch.ones(8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    copy_pages(pool, none, pool, none, 4, 4)
    assert pool.tolist() == [1] * 8


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((torch.zeros(8), torch.zeros(1, dtype=torch.int64)), "target: must be flat uint8"),
        ((torch.zeros(8, dtype=torch.uint8), torch.zeros(1)), "starts: must be flat int64"),
        ((torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)), "2 targets for 1"),
    ],
)
def test_wrong_copies_are_refused(arguments: tuple[torch.Tensor, torch.Tensor], match: str) -> None:
    source = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=match):
        copy_pages(*arguments, source, torch.zeros(1, dtype=torch.int64), 4, 4)
