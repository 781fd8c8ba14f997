"""Embeddings inside pages, and prompts that read themselves in both directions."""

from typing import Any

import pytest
import torch

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.portable import PortableKernels
from kvell.memory import GroupKind, GroupSpec, LayerSpec
from kvell.models.forward.both_directions import BothDirections
from kvell.models.forward.image_side import EmbeddingPages
from kvell.models.images.image_batch import PageRows

PAGES, TOKENS, SIZE = 6, 4, 24
LAYERS = tuple(LayerSpec(i, GroupKind.FULL, 2, 8, 4) for i in (0, 2))
OWN = LayerSpec(3, GroupKind.VISION, 1, SIZE, 4, tensors=1)


def group_of(layers: tuple[LayerSpec, ...], padding: int = 64) -> GroupSpec:
    token_bytes = layers[0].token_bytes
    stride = token_bytes * len(layers) * TOKENS + padding
    indices = tuple(layer.index for layer in layers)
    return GroupSpec("g", layers[0].kind, indices, token_bytes, TOKENS, stride, 2)


def rows_of(*places: tuple[int, int]) -> PageRows:
    return PageRows(*(torch.tensor(column) for column in zip(*places, strict=True)))


def pool_of(group: GroupSpec) -> torch.Tensor:
    return torch.full((PAGES * group.page_stride_bytes,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("layers", [(OWN,), LAYERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_is_loaded(layers: tuple[LayerSpec, ...], dtype: torch.dtype) -> None:
    group = group_of(layers)
    pages = EmbeddingPages(group, layers, pool_of(group), SIZE)
    rows, values = rows_of((5, 0), (1, 3), (1, 2)), torch.randn(3, SIZE).to(dtype)
    pages.store(rows, values)
    assert torch.equal(pages.load(rows, dtype), values)
    assert torch.equal(pages.load(rows_of((1, 3)), dtype), values[1:2])


def test_keys_and_values_of_other_tokens_leave_an_embedding_alone() -> None:
    """The whole of row 1 of every vector block is another token's."""
    group, kernels = group_of(LAYERS), PortableKernels()
    pool = pool_of(group)
    pages, values = EmbeddingPages(group, LAYERS, pool, SIZE), torch.randn(1, SIZE)
    pages.store(rows_of((2, 3)), values)
    empty = torch.empty(0, dtype=torch.int32)
    pages_of_tokens, rows = torch.full((3,), 2), torch.arange(3)
    batch = GroupBatch(empty, empty, empty, empty, empty, pages_of_tokens.int(), rows.int())
    for layer in LAYERS:
        place = LayerPages(
            pool,
            torch.float32,
            group.page_stride_bytes,
            group.layer_offset_bytes(layer.index),
            TOKENS,
            2,
            8,
        )
        kernels.write_kv(place, batch, torch.randn(3, 2, 8), torch.randn(3, 2, 8))
    assert torch.equal(pages.load(rows_of((2, 3)), torch.float32), values)


def test_nothing_is_written_outside_of_a_row() -> None:
    group = group_of((OWN,))
    pool = pool_of(group)
    EmbeddingPages(group, (OWN,), pool, SIZE).store(rows_of((2, 1)), torch.zeros(1, SIZE))
    changed = torch.nonzero(pool != 0xFF).flatten()
    start = 2 * group.page_stride_bytes + SIZE * 4
    assert changed.tolist() == list(range(start, start + SIZE * 4))


def test_an_embedding_that_does_not_fit_a_token_is_an_error() -> None:
    group = group_of(LAYERS[:1])
    pages = EmbeddingPages(group, LAYERS[:1], pool_of(group), 40)
    with pytest.raises(ValueError, match="does not fit"):
        pages.store(rows_of((0, 0)), torch.zeros(1, 40))


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """All tokens read all tokens; [T, heads, size]."""
    grouped = [x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (key, value)]
    scores = query.transpose(0, 1) @ grouped[0].transpose(1, 2) * 0.5
    return (scores.softmax(-1) @ grouped[1]).transpose(0, 1)


@pytest.mark.parametrize("window_tokens", [0, 3])
def test_tokens_of_a_prefix_read_all_of_it_whatever_the_window(window_tokens: int) -> None:
    """Of two requests one has a prefix of six tokens, and two that follow it."""
    layer = LAYERS[0]
    group = group_of((layer,))
    pool = pool_of(group)
    place = LayerPages(pool, torch.float32, group.page_stride_bytes, 0, TOKENS, 2, 8)
    ints = {
        "query_starts": [0, 8, 10],
        "context_lens": [8, 2],
        "table_starts": [0, 2, 3],
        "page_ids": [4, 1, 5],
        "first_positions": [0, 0],
        "write_page_ids": [4] * 4 + [1] * 4 + [5] * 2,
        "write_offsets": [0, 1, 2, 3, 0, 1, 2, 3, 0, 1],
    }
    named: dict[str, Any] = {n: torch.tensor(v, dtype=torch.int32) for n, v in ints.items()}
    batch = GroupBatch(**named)
    query, key, value = torch.randn(10, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    kernels = PortableKernels()
    kernels.write_kv(place, batch, key, value)
    params = AttendParams(scale=0.5, window_tokens=window_tokens)
    output = BothDirections((6, 0)).attend(kernels, place, batch, query, params)
    causal = kernels.attend(place, batch, query, params)
    assert torch.equal(output[6:], causal[6:])
    expected = dense(query[:6], key[:6], value[:6])
    assert (output[:6] - expected).abs().max() < 1e-5
    assert (causal[:5] - expected[:5]).abs().max() > 1e-2, "the last one reads all anyway"
    assert torch.equal(BothDirections(()).attend(kernels, place, batch, query, params), causal)
