"""Results depend on positions alone: not on batch, chunk, placement or threads."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvell.attention.interface import AttentionKernels
from tests.attention.cases import Case, Shape, attend, make_case, only

LONG = 700

SHAPES = {
    "full": Shape(((LONG, LONG),), heads=6, kv_heads=2, head_size=64),
    "window": Shape(((LONG, LONG),), heads=3, kv_heads=1, head_size=32, window_tokens=150),
    "window inside a page": Shape(((LONG, LONG),), heads=3, kv_heads=1, window_tokens=7),
    "many heads, capped, sinks": Shape(
        ((LONG, LONG),), heads=8, kv_heads=1, head_size=40, softcap=4.0, sinks=True
    ),
    "chunks": Shape(((LONG, LONG),), heads=3, kv_heads=1, head_size=32, chunk_tokens=150),
    "latents": Shape(((LONG, LONG),), heads=5, kv_heads=1, head_size=40, value_size=24),
    "int8": Shape(((LONG, LONG),), heads=4, kv_heads=2, head_size=32, pool_dtype=torch.int8),
    "pages of 8": Shape(((LONG, LONG),), heads=2, kv_heads=2, head_size=128, page_tokens=8),
}


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def case(request: pytest.FixtureRequest, dtype: torch.dtype) -> Case:
    shape: Shape = request.param
    return make_case(replace(shape, dtype=dtype))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def test_decode_equals_prefill_to_the_last_bit(kernels: AttentionKernels, case: Case) -> None:
    whole = attend(kernels, case)
    for position in (0, 1, 7, 15, 16, 63, 64, 65, 127, 200, 511, 512, 513, 600, LONG - 1):
        alone = attend(kernels, only(case, 0, position + 1, 1))
        assert torch.equal(alone[0], whole[position]), f"position {position}"


@pytest.mark.parametrize(
    "chunk",
    [33, *(pytest.param(chunk, marks=pytest.mark.long) for chunk in (7, 64, 250))],
)
def test_prefill_chunks_equal_the_whole(kernels: AttentionKernels, case: Case, chunk: int) -> None:
    parts = [attend(kernels, only(case, 0, end, new)) for end, new in _chunks(0, 300, chunk)]
    assert torch.equal(torch.cat(parts), attend(kernels, only(case, 0, 300, 300)))


def _chunks(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, size):
        stop = min(start + size, end)
        yield stop, stop - start


def test_placement_does_not_matter(kernels: AttentionKernels, case: Case) -> None:
    small = only(case, 0, 200, 30)
    assert torch.equal(attend(kernels, small, placement=1), attend(kernels, small, placement=2))


def test_other_requests_do_not_matter(kernels: AttentionKernels, case: Case) -> None:
    crowd_shape = replace(case.shape, requests=((90, 90), (LONG, 1), (130, 5), (513, 1), (64, 1)))
    crowd = make_case(crowd_shape)
    together = torch.split(attend(kernels, crowd), [new for _, new in crowd_shape.requests])
    for i, (context, new) in enumerate(crowd_shape.requests):
        assert torch.equal(attend(kernels, only(crowd, i, context, new)), together[i])


def test_page_size_does_not_matter_for_compiled_or_torch_kernels(
    kernels: AttentionKernels, dtype: torch.dtype
) -> None:
    shape = Shape(((300, 40),), heads=4, kv_heads=2, dtype=dtype)
    by_page = [
        attend(kernels, make_case(replace(shape, page_tokens=tokens))) for tokens in (1, 8, 16, 48)
    ]
    assert all(torch.equal(by_page[0], other) for other in by_page[1:])


def test_what_follows_a_token_cannot_reach_it(kernels: AttentionKernels) -> None:
    case = make_case(Shape(((128, 128),), heads=6, kv_heads=2))
    changed = replace(case, values=[case.values[0].clone()], keys=[case.keys[0].clone()])
    changed.values[0][70:] = 1e30
    changed.keys[0][70:] = -1e4
    assert torch.equal(attend(kernels, changed)[:70], attend(kernels, case)[:70])
    assert not torch.equal(attend(kernels, changed)[70:], attend(kernels, case)[70:])
