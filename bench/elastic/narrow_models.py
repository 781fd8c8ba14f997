"""Shapes of ``bench/configs``, narrowed so that two cores can serve them; all layers stay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.replay.shapes import read_shape
from kvell.attention.choice import choose_kernels
from kvell.models.paged_model import PagedModel
from tests.models.random_model import random_paged_model


@dataclass(frozen=True)
class Shape:
    """A narrowed config of ``bench/configs``, and a memory size that is tight for it.

    :param fits: requests for whose KV there is memory, if activations take none of it.
    :param narrower: sizes that are not exactly an eighth of the model's.
    """

    name: str
    fits: float
    narrower: Mapping[str, int] = field(default_factory=dict)


NARROWER = 8
"""Widths and vocabulary are divided by it; layers, and so KV beside activations, stay."""
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", 2.6),
        Shape("ministral-8b", 3.3),
        Shape(
            "falcon-h1-7b",
            5.0,
            # An eighth of 12 heads and 2 pairs of keys and values of 128 numbers, and of 24 states.
            {
                "num_attention_heads": 6,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "mamba_d_ssm": 384,
                "mamba_n_heads": 3,
            },
        ),
    )
}
"""Jamba's layers of experts and its states of Mamba 1 have no compiled pass; Falcon-H1 stands for
the hybrids."""
WINDOW_TOKENS = 2048
"""Window of sliding layers: a sixteenth of the paper's, like the prompts."""


def narrow_config(name: str) -> Any:
    """The narrowed config of a shape of ``bench/configs``."""
    config = read_shape(name).config
    narrower = {
        width: max(1, getattr(config, width) // NARROWER)
        for width in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
    }
    for width, size in (narrower | dict(SHAPES[name].narrower)).items():
        setattr(config, width, size)
    config.max_position_embeddings = 16_384
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW_TOKENS
    return config


def narrow_model(name: str) -> PagedModel:
    """A narrowed shape with random weights; see :func:`random_model`."""
    return random_model(narrow_config(name))


def random_model(config: Any) -> PagedModel:
    """Random weights in bfloat16, computed by the compiled pass.

    :raises RuntimeError: if this machine has no compiled pass for such layers.
    """
    kernels = choose_kernels(torch.device("cpu"))
    model = random_paged_model(config, kernels, 3, torch.bfloat16, scale=8.0)
    if model.fused is None:
        raise RuntimeError("there is no compiled pass on this machine")
    return model
