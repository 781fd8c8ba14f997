"""The contract through Triton's interpreter: small blocks, so that small cases have many.

A GPU runs larger cases of the same contract natively: ``scripts/gpu_check``.
"""

import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvell.attention.choice import kernels_for
from kvell.attention.interface import HostLengths
from kvell.attention.merge import merge
from kvell.attention.portable import PortableKernels
from kvell.attention.quantised import quantise
from tests.attention.cases import (
    Case,
    Shape,
    attend,
    dense_attention,
    make_case,
    new_queries,
    only,
    starts_of,
    store,
)
from tests.attention.poison import NAN, check, poison_each, poison_the_rest
from tests.models.cases import long_unless

pytest.importorskip("triton", reason="Triton is not made for this system")

from kvell.attention.triton import backend
from kvell.attention.triton.backend import TritonKernels
from kvell.attention.triton.sizes import Blocks

RAGGED = ((1, 1), (25, 25), (40, 1), (20, 5))
BLOCKS = (Blocks(16, 16, 4, 1, section_tokens=32), Blocks(32, 16, 4, 1))

SHAPES = {
    "grouped heads": Shape(RAGGED, heads=6, kv_heads=2, head_size=8),
    "sections that double": Shape(((300, 1),), heads=2, kv_heads=1, head_size=8),
    "more heads than a tile": Shape(((20, 1), (18, 18)), heads=40, kv_heads=1, head_size=8),
    "pages of 24, head size 24": Shape(RAGGED, 2, 2, 24, page_tokens=24),
    "head size 10": Shape(RAGGED, heads=2, kv_heads=1, head_size=10),
    "window": Shape(RAGGED, 2, 1, 8, window_tokens=20),
    "window of one token": Shape(((40, 3),), 2, 1, 8, window_tokens=1),
    "all at once": Shape(RAGGED, 2, 1, 8, 8, window_tokens=33, softcap=5.0, sinks=True),
    "chunks and a window": Shape(RAGGED, 2, 1, 8, chunk_tokens=25, window_tokens=20),
    "latents": Shape(RAGGED, heads=6, kv_heads=1, head_size=24, value_size=16),
    "latents of several heads": Shape(((20, 2), (25, 20)), 4, 2, 40, value_size=24),
    "int8": Shape(RAGGED, heads=2, kv_heads=1, head_size=16, pool_dtype=torch.int8),
    "fp8 latents": Shape(RAGGED, 2, 1, 24, value_size=16, pool_dtype=torch.float8_e4m3fn),
    "bfloat16 below float32": Shape(RAGGED, 2, 1, 16, pool_dtype=torch.bfloat16),
    "a request without new tokens": Shape(((20, 3), (30, 0), (40, 20)), 2, 1, 8),
}

FEW = ("head size 10", "window", "all at once", "int8", "fp8 latents")
"""In the fast suite."""


@pytest.fixture
def kernels() -> TritonKernels:
    return TritonKernels(BLOCKS)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=long_unless(name in FEW))
        for name, shape in SHAPES.items()
    ],
)
def test_float32_is_exact(kernels: TritonKernels, shape: Shape) -> None:
    case = make_case(shape)
    torch.testing.assert_close(
        attend(kernels, case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
    )


def test_quantised_vectors_whose_scales_are_not_aligned_are_left_to_portable_kernels(
    kernels: TritonKernels,
) -> None:
    assert kernels_for(kernels, [64, 50], torch.int8).name == "portable"
    assert kernels_for(kernels, [64, 50], torch.bfloat16) is kernels
    assert kernels_for(kernels, [64, 52], torch.int8) is kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pool_dtype", [None, torch.float8_e4m3fn])
def test_short_floats_lose_a_rounding(
    kernels: TritonKernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    pool_dtype: torch.dtype | None,
) -> None:
    """The interpreter multiplies no 16-bit matrices: here they are widened before.

    It also cuts bfloat16 off where a GPU rounds, which costs twice a rounding.
    """
    monkeypatch.setattr(backend, "working_dtype", lambda query, layer: torch.float32)
    requests = ((40, 1), (25, 20))
    case = make_case(Shape(requests, 2, 1, 16, dtype=dtype, pool_dtype=pool_dtype, sinks=True))
    output, exact = attend(kernels, case), dense_attention(case)
    assert output.dtype == dtype
    error = (output.double() - exact).square().mean().sqrt()
    allowed = {torch.bfloat16: 2.5, torch.float16: 1.6}[dtype]
    assert error <= allowed * (exact.to(dtype).double() - exact).square().mean().sqrt()


POISONED = {
    "tiles": Shape(((20, 18),), heads=2, kv_heads=1, head_size=8),
    "sections": Shape(((18, 3),), heads=2, kv_heads=1, head_size=8),
    "a window": Shape(((26, 18),), 2, 1, 8, window_tokens=9),
    "int8": Shape(((20, 18),), 2, 1, 16, pool_dtype=torch.int8),
    "fp8 latents": Shape(((20, 18),), 2, 1, 24, value_size=16, pool_dtype=torch.float8_e4m3fn),
}


@pytest.mark.long
@pytest.mark.parametrize("shape", POISONED.values(), ids=POISONED.keys())
def test_a_position_spoils_the_rows_that_read_it_and_no_other(
    kernels: TritonKernels, shape: Shape
) -> None:
    poison_each(kernels, shape)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=long_unless(name in ("tiles", "sections")))
        for name, shape in POISONED.items()
    ],
)
def test_what_follows_a_row_never_reaches_it(kernels: TritonKernels, shape: Shape) -> None:
    poison_the_rest(kernels, shape)


@pytest.mark.parametrize("requests", [((25, 20),), ((70, 3),)])
def test_a_query_that_is_no_number_gives_none(
    kernels: TritonKernels, requests: tuple[tuple[int, int], ...]
) -> None:
    shape = Shape(requests, heads=2, kv_heads=1, head_size=8)
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    sound = kernels.attend(stored.layer, stored.batch, query, shape.params)
    spoiled = torch.zeros(query.shape[:2], dtype=torch.bool)
    spoiled[1, 0] = True
    query[1, 0] = NAN
    output = kernels.attend(stored.layer, stored.batch, query, shape.params)
    check(output, sound, spoiled, "row 1")


def test_other_requests_and_places_do_not_matter(kernels: TritonKernels) -> None:
    shape = Shape(((20, 20), (40, 1), (35, 5)), heads=2, kv_heads=1, head_size=8)
    case = make_case(shape)
    together = torch.split(attend(kernels, case), [new for _, new in shape.requests])
    for i, (context, new) in enumerate(shape.requests):
        alone = attend(kernels, only(case, i, context, new), placement=i + 1)
        assert torch.equal(alone, together[i]), f"request {i}"


def test_draft_tokens_are_scored_as_decodes_are(kernels: TritonKernels) -> None:
    case = make_case(Shape(((40, 4),), heads=4, kv_heads=1, head_size=8))
    together = attend(kernels, case)
    for row in range(4):
        alone = attend(kernels, only(case, 0, 37 + row, 1))
        # The interpreter multiplies with numpy, which on some processors rounds a row by its place.
        torch.testing.assert_close(alone[0], together[row], atol=5e-7, rtol=0)


def parts_of(kernels: TritonKernels, case: Case, cuts: list[int]) -> torch.Tensor:
    """Merged partials over pages cut at page positions."""
    stored = store(kernels, case)
    batch, found = stored.batch, []
    begins, ends = batch.table_starts[:-1].tolist(), batch.table_starts[1:].tolist()
    for first, last in pairwise([0, *cuts, 1 << 20]):
        spans = [(min(b + first, e), min(b + last, e)) for b, e in zip(begins, ends, strict=True)]
        skipped = [s - b for (s, _), b in zip(spans, begins, strict=True)]
        cut = replace(
            batch,
            table_starts=starts_of([e - s for s, e in spans]),
            page_ids=torch.cat([batch.page_ids[s:e] for s, e in spans]),
            first_positions=batch.first_positions + torch.tensor(skipped, dtype=torch.int32),
        )
        found.append(
            kernels.attend_partial(stored.layer, cut, new_queries(case), case.shape.params)
        )
    return merge(found, case.shape.params.sinks)


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 40]], ids=str)
def test_merged_parts_equal_the_whole(kernels: TritonKernels, cuts: list[int]) -> None:
    case = make_case(Shape(((50, 2), (30, 20)), 2, 1, 8, 8, window_tokens=30, sinks=True))
    merged = parts_of(kernels, case, cuts)
    torch.testing.assert_close(merged.double(), dense_attention(case), atol=5e-6, rtol=1e-5)


def test_a_partial_is_the_portable_kernels(kernels: TritonKernels) -> None:
    case = make_case(Shape(((40, 1), (30, 20)), 2, 1, 8))
    stored, query, params = store(kernels, case), new_queries(case), case.shape.params
    ours = kernels.attend_partial(stored.layer, stored.batch, query, params)
    theirs = PortableKernels().attend_partial(stored.layer, stored.batch, query, params)
    torch.testing.assert_close(vars(ours), vars(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("new", [2, 20])
def test_an_empty_part_says_so(kernels: TritonKernels, new: int) -> None:
    case = make_case(Shape(((40, new),), 2, 1, 8))
    stored = store(kernels, case)
    nothing = replace(
        stored.batch,
        table_starts=torch.zeros(2, dtype=torch.int32),
        page_ids=stored.batch.page_ids[:0],
    )
    part = kernels.attend_partial(stored.layer, nothing, new_queries(case), case.shape.params)
    assert torch.equal(part.output, torch.zeros(new, 2, 8))
    assert torch.equal(part.maximum, torch.full((new, 2), -torch.inf))
    assert torch.equal(part.denominator, torch.zeros(new, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_kernels_store_the_same_bytes(kernels: TritonKernels, dtype: torch.dtype) -> None:
    case = make_case(Shape(((40, 40),), heads=2, kv_heads=2, head_size=16, pool_dtype=dtype))
    case.keys[0][16, 0] = 0.0  # has no scale
    case.keys[0][17, 0] *= 1e-6
    stored = store(kernels, case)
    layer, page = stored.layer, int(stored.batch.page_ids[1])
    start = page * layer.page_stride_bytes + layer.layer_offset_bytes
    rows = layer.pool[start : start + layer.page_bytes].view(2, 2, 16, layer.row_bytes)
    for tensor, given in zip(rows, (case.keys[0], case.values[0]), strict=True):
        assert torch.equal(tensor, quantise(given[16:32], dtype).transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_pool_is_written_as_the_portable_kernels_write_it(
    kernels: TritonKernels, dtype: torch.dtype
) -> None:
    case = make_case(Shape(((40, 1), (9, 1)), 2, 2, 8, pool_dtype=dtype))
    ours, theirs = (store(each, case).layer.pool for each in (kernels, PortableKernels()))
    assert torch.equal(ours, theirs)


def test_keys_and_values_may_be_views(kernels: TritonKernels) -> None:
    case = make_case(Shape(((20, 20),), heads=4, kv_heads=2, head_size=8))
    fused = torch.cat([case.queries[0], case.keys[0], case.values[0]], 1)
    views = replace(case, queries=[fused[:, :4]], keys=[fused[:, 4:6]], values=[fused[:, 6:]])
    assert torch.equal(attend(kernels, views), attend(kernels, case))


def test_no_requests(kernels: TritonKernels) -> None:
    assert attend(kernels, make_case(Shape(()))).shape == (0, 9, 64)


def test_large_scores_do_not_overflow(kernels: TritonKernels) -> None:
    case = make_case(Shape(((30, 3), (30, 20)), 2, 1, 8))
    loud = replace(case, queries=[query * 1000 for query in case.queries])
    torch.testing.assert_close(
        attend(kernels, loud).double(), dense_attention(loud), atol=1e-3, rtol=1e-3
    )


def test_lengths_on_the_host_are_believed(kernels: TritonKernels) -> None:
    """Kernels do not ask the device for what they were told."""
    case = make_case(Shape(((20, 2), (20, 17)), 2, 1, 8))
    stored = store(kernels, case)
    whole = kernels.attend(stored.layer, stored.batch, new_queries(case), case.shape.params)
    lengths = HostLengths(
        *(getattr(stored.batch, name) for name in HostLengths.__dataclass_fields__)
    )
    unread = torch.full_like(stored.batch.query_starts, -1)
    told = replace(
        stored.batch,
        query_starts=unread,
        context_lens=unread,
        table_starts=unread,
        first_positions=unread,
        host=lengths,
    )
    again = kernels.attend(stored.layer, told, new_queries(case), case.shape.params)
    assert torch.equal(again, whole)


def test_one_kernels_object_serves_many_layers_and_steps(kernels: TritonKernels) -> None:
    """What is remembered of a layer or a batch is never another's."""
    for seed in range(2):
        for window in (0, 9):
            shape = Shape(((20, 2),), 2, 1, 8, window_tokens=window, seed=seed)
            case = make_case(shape)
            torch.testing.assert_close(
                attend(kernels, case).double(), dense_attention(case), atol=5e-6, rtol=1e-5
            )


def test_a_layer_that_is_gone_keeps_no_memory(kernels: TritonKernels) -> None:
    stored = store(kernels, make_case(Shape(((20, 1),), 2, 1, 8)))
    query, params = torch.zeros(1, 2, 8), Shape((), 2, 1, 8).params
    kernels.attend(stored.layer, stored.batch, query, params)
    pool = weakref.ref(stored.layer.pool)
    del stored
    assert pool() is None
