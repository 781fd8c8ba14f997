"""Head shapes of the configs, the bytes that a run reads, and the machine's measured limits."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from bench.attention.decode_shapes import (
    Cell,
    Shape,
    below,
    layers_of,
    measured,
    random_pool,
    show,
)
from bench.machine import (
    Roofline,
    best_seconds,
    describe,
    gemm_rate,
    measured_roofline,
    read_bandwidth,
)

LLAMA = Shape("llama", 32, 8, 128)
LATENT = Shape("deepseek", 16, 1, 576, 512)


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
    cell = measured(Shape("small", 4, 2, 64), 32, pool, 2, iter(range(100)).__next__, 2)
    assert cell.read_bytes == pool.numel()
    assert {size: len(taken) for size, taken in cell.seconds.items()} == {16: 2, 8: 2}
    assert cell.limits == [pool.numel()] * 2, "read in one tick of the clock"


def test_only_what_is_slow_is_named() -> None:
    roofline = Roofline(read_bytes_per_second=140.0, gemm_flops_per_second=30.0 * 70)
    fast = Cell(LLAMA, 1024, 100, {16: [1.0, 2.0], 8: [1.5, 2.0]}, [140.0, 70.0])
    slow = Cell(LATENT, 2048, 100, {16: [2.0, 2.0], 8: [2.0, 2.0]}, [140.0, 140.0])
    [named] = below([fast, slow], roofline)
    assert named == "16/1 x 576 latent at 2048: 36%, of its roofline 72%"
    assert fast.small_over_large == 1.25


def test_arithmetic_of_a_byte_is_query_heads_over_kv_heads_unless_keys_are_values_too() -> None:
    assert LLAMA.flops_per_byte == 32 / 8
    assert LATENT.flops_per_byte == 2 * 16 * (576 + 512) / (576 * 2)


def test_the_lower_of_two_limits_counts() -> None:
    roofline = Roofline(read_bytes_per_second=10.0, gemm_flops_per_second=100.0)
    assert LLAMA.limit(roofline) == 10.0
    assert LATENT.limit(roofline) == 100.0 / LATENT.flops_per_byte


def test_a_table_says_what_bounds_each_shape() -> None:
    console = Console(width=150, record=True, file=StringIO())
    seconds = {16: [10.0], 8: [20.0]}
    cells = [Cell(shape, 1024, 100, seconds, [20.0]) for shape in (LLAMA, LATENT)]
    show(console, cells, Roofline(read_bytes_per_second=20.0, gemm_flops_per_second=400.0))
    llama, latent = (line for line in console.export_text().splitlines() if " x " in line)
    assert "memory" in llama and "50% (25%)" in llama
    assert "arithmetic" in latent and "76% to 76%" in latent


def test_a_pool_is_random_and_finite() -> None:
    numbers = random_pool(1 << 16).view(torch.bfloat16)
    assert numbers.numel() == 1 << 15
    assert bool(numbers.isfinite().all()) and 0.9 < float(numbers.float().std()) < 1.1


def test_work_is_done_once_more_than_measured() -> None:
    calls: list[int] = []
    assert best_seconds(lambda: calls.append(1), rounds=3) >= 0
    assert len(calls) == 4


def test_rates_are_positive_and_in_basic_units() -> None:
    assert read_bandwidth(rounds=1, size_bytes=1 << 20) > 1e6
    assert gemm_rate(torch.float32, rounds=1, size=64) > 1e6


def test_decode_reads_weights_once_and_the_kv_of_everybody() -> None:
    roofline = Roofline(read_bytes_per_second=1e9, gemm_flops_per_second=1e12)
    assert roofline.decode_tokens_per_second(100_000_000, 1, 0) == 10
    assert roofline.decode_tokens_per_second(100_000_000, 4, 25_000_000) == 20


def test_prefill_multiplies_and_adds_every_parameter() -> None:
    roofline = Roofline(read_bytes_per_second=1e9, gemm_flops_per_second=1e12)
    assert roofline.prefill_tokens_per_second(100_000_000) == 5_000


def test_a_description_says_how_many_threads_measured() -> None:
    found = describe()
    assert found["threads"] == torch.get_num_threads()
    assert isinstance(found["read_bandwidth_gb_per_second"], float)


def test_the_limit_of_products_is_that_of_the_faster_type(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.bfloat16: 1e6, torch.float32: 2e9}
    monkeypatch.setattr(
        "bench.machine.gemm_rate", lambda dtype=torch.bfloat16, *_, **__: rates[dtype]
    )
    monkeypatch.setattr("bench.machine.read_bandwidth", lambda _rounds: 1.0)
    assert measured_roofline() == Roofline(1.0, 2e9)
    rates[torch.bfloat16] = 3e12
    assert measured_roofline() == Roofline(1.0, 3e12)
