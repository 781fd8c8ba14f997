"""Activations of real shapes, counted by hand at their widest point."""

import pytest

from bench.elastic.activation_bytes import FIXED_BYTES, activation_model
from bench.replay.shapes import read_shape


@pytest.mark.parametrize(
    ("name", "widest"),
    [
        ("llama3-8b", 3 * 14336),  # the gated MLP
        ("jamba-mini", 2 * (3 * 14336 + 4096)),  # two experts and their outputs
    ],
)
def test_the_widest_point_of_a_layer_decides(name: str, widest: int) -> None:
    shape = read_shape(name)
    model = activation_model(shape.config, shape.description, 2)
    assert model.fixed_bytes == FIXED_BYTES
    assert model.token_bytes == 2 * (2 * 4096 + widest)
    assert model.logits_row_bytes == 6 * shape.description.vocab_size


def test_every_shape_of_the_bench_has_one() -> None:
    for name in ("gemma3-27b", "qwen3-next", "nemotron-h-8b", "falcon-h1-7b", "qwen3-8b"):
        shape = read_shape(name)
        model = activation_model(shape.config, shape.description, 2)
        hidden = shape.description.hidden_size
        assert 2 * 4 * hidden < model.token_bytes < 2 * 200 * hidden
