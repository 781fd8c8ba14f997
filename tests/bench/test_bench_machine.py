"""The machine's measured limits, and rates derived from them."""

import pytest
import torch

from bench.machine import (
    Roofline,
    best_seconds,
    describe,
    gemm_rate,
    measured_roofline,
    read_bandwidth,
)


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
