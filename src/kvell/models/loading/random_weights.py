"""Models with random weights over real configs: for tests, benches and planning runs.

Random transformers often repeat one token for any input, and a test on such a model proves nothing.
So embeddings are untied and matrices scaled up until the outputs vary; :func:`varies` checks that.
"""

from pathlib import Path
from typing import Any

import torch

from kvell.models.loading.weights import auto_class

SCALES = (8.0, 16.0, 32.0, 4.0)
"""Factors tried in turn on the weight matrices."""
DUMMY_SCALE = SCALES[0]
"""The factor of models whose answers do not matter."""

LOG_DECAYS = (-6.0, -1.0)
"""Range of the logarithm of a recurrence's decay per unit of time."""

PROBE_SHAPE = (4, 16)
"""Number of probe prompts, and of tokens in each."""


def random_module(
    config: Any, seed: int, dtype: torch.dtype = torch.float32, scale: float | None = None
) -> Any:
    """Make a transformers causal LM on the CPU; weights depend on config, seed and scale alone.

    :param scale: factor on all matrices; None takes the first of ``SCALES`` that makes
        the outputs vary.  The config is not changed: a copy is untied.
    :raises ValueError: if no scale makes them vary.
    """
    for factor in SCALES if scale is None else (scale,):
        module = _draw(config, seed, dtype, factor)
        if scale is not None or varies(module, seed):
            return module
    raise ValueError(f"the outputs of {type(config).__name__} vary at none of the scales {SCALES}")


def varies(module: Any, seed: int = 0, share: float = 0.5) -> bool:
    """Return whether more than a share of the greedy tokens over random prompts are distinct.

    Logits that are not finite do not count as varying.
    """
    vocab = int(module.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(0, vocab, PROBE_SHAPE, generator=generator)
    with torch.inference_mode():
        logits = module(input_ids=prompts, use_cache=False).logits
    distinct = logits.argmax(-1).unique().numel()
    return bool(logits.isfinite().all()) and distinct > share * prompts.numel()


def write_random_model(
    directory: Path,
    config: Any,
    seed: int,
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
) -> Path:
    """Write a random model as a transformers directory (without a tokenizer); return it."""
    random_module(config, seed, dtype, scale).save_pretrained(directory)
    return directory


def _draw(config: Any, seed: int, dtype: torch.dtype, scale: float) -> Any:
    untied = type(config).from_dict(config.to_dict() | {"tie_word_embeddings": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = auto_class(untied).from_config(untied, dtype=dtype).eval()
        _fill(module, scale)
    return module


@torch.no_grad()
def _fill(module: Any, scale: float) -> None:
    """Scale the matrices; fill vectors that start at zero (biases, sinks) with random numbers.

    Logarithms of decays are drawn such that states remember some tens of tokens.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(*LOG_DECAYS)
        elif parameter.dim() > 1:
            parameter.mul_(scale)
        elif not parameter.any():
            parameter.normal_(std=0.2)
