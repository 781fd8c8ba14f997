"""Head shapes of the configs, and what a run of each reads."""

import pytest
import torch

from bench.attention.decode_shapes import Cell, Shape, below, layers_of, measured, shapes

LLAMA = Shape("llama", 32, 8, 128)
LATENT = Shape("deepseek", 16, 1, 576, 512)


def test_every_shape_is_there_once() -> None:
    found = [(one.heads, one.kv_heads, one.head_size) for one in shapes()]
    assert len(found) == len(set(found))
    assert {(9, 3, 64), (32, 8, 128), (32, 16, 128), (64, 8, 64), (16, 1, 576)} <= set(found)


def test_a_latent_is_stored_once() -> None:
    assert LLAMA.token_bytes == 2 * 8 * 128 * 2
    assert LATENT.token_bytes == 576 * 2
    assert (LLAMA.label, LATENT.label) == ("32/8 x 128", "16/1 x 576 latent")


@pytest.mark.parametrize("page_tokens", [8, 16])
def test_layers_fill_the_pool_and_stay_in_it(page_tokens: int) -> None:
    pool = torch.zeros(1 << 20, dtype=torch.uint8)
    layers = layers_of(pool, LLAMA, page_tokens, 64)
    assert len(layers) == 4
    last = layers[-1]
    pages = 64 // page_tokens
    end = (pages - 1) * last.page_stride_bytes + last.layer_offset_bytes + last.page_bytes
    assert end == pool.numel()


def test_a_run_reads_whole_contexts_and_pages_take_turns() -> None:
    pool = torch.zeros(1 << 18, dtype=torch.bfloat16).view(torch.uint8)
    cell = measured(Shape("small", 4, 2, 64), 64, pool, 2, iter(range(100)).__next__)
    assert cell.read_bytes == pool.numel()
    assert {size: len(taken) for size, taken in cell.seconds.items()} == {16: 2, 8: 2}


def test_only_what_is_slow_is_named() -> None:
    fast = Cell(LLAMA, 1024, 100, {16: [1.0, 2.0], 8: [1.5, 2.0]})
    slow = Cell(LATENT, 2048, 100, {16: [2.0, 2.0], 8: [2.0, 2.0]})
    assert below([fast, slow], 140.0) == ["16/1 x 576 latent at 2048: 36%"]
    assert fast.small_over_large == 1.25
