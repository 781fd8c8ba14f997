"""Tiny models of which a part of the weights is NaN."""

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from kvell.models.loading.random_weights import write_random_model
from tests.llm.guilty_instance import GUILTY
from tests.models.harness import tiny_config

POISON = 777
"""A token whose embedding is NaN in a poisoned model."""
WORDS = 49_152


def write_model(
    directory: Path, tokenizer: Path, broken: tuple[str, int | None] | None = None
) -> Path:
    """A tiny dense model; of ``broken``, a tensor's name and one of its rows or None, is NaN.

    It never makes ``POISON`` or ``GUILTY`` itself.

    :param tokenizer: a model whose tokenizer it has.
    """
    directory.mkdir()
    config = tiny_config("LlamaForCausalLM", vocab_size=WORDS)
    path = write_random_model(directory, config, 1, scale=8.0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][[POISON, GUILTY]] = 0.0
    if broken is not None:
        name, row = broken
        tensors[name][slice(None) if row is None else row] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def write_poisoned(directory: Path, tokenizer: Path) -> Path:
    """A sound model but for one token: whatever reads that one computes NaN."""
    return write_model(directory, tokenizer, ("model.embed_tokens.weight", POISON))


def write_broken(directory: Path, tokenizer: Path) -> Path:
    return write_model(directory, tokenizer, ("model.norm.weight", None))
