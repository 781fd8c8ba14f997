"""The models of the cost benches: a real one, and two real shapes with random weights.

All have SmolLM2's tokenizer and vocabulary, so that each can be served.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from kvell.models.loading.random_weights import write_random_model
from kvell.models.sources.progress import Progress, quiet
from kvell.models.sources.source import resolve_model

VOCAB_SIZE = 49_152
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NAMES = ("smollm2", "gemma-3-270m", "falcon-h1-small")


def model_path(name: str, cache_dir: Path, work_dir: Path, progress: Progress = quiet) -> Path:
    """The directory of a model; random ones are written once."""
    real = resolve_model("smollm2", cache_dir, progress)
    if name == "smollm2":
        return real
    path = work_dir / name
    if not (path / TOKENIZER_FILES[0]).is_file():
        progress(f"writing {name}", 0.0)
        write_random_model(path, _CONFIGS[name](), seed=0, dtype=torch.bfloat16, scale=1.0)
        for file in TOKENIZER_FILES:
            shutil.copy(real / file, path / file)
    return path


def gemma3_270m(vocab_size: int = VOCAB_SIZE) -> Any:
    """Gemma-3-270M but for the vocabulary: 15 sliding layers of 512 tokens, 3 full."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=32768,
        query_pre_attn_scalar=256,
        architectures=["Gemma3ForCausalLM"],
    )


def falcon_h1_small() -> Any:
    """Falcon-H1 (attention and Mamba 2 side by side in every layer), scaled down to 12 layers."""
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=1024,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_n_groups=1,
        max_position_embeddings=32768,
        architectures=["FalconH1ForCausalLM"],
    )


_CONFIGS = {"gemma-3-270m": gemma3_270m, "falcon-h1-small": falcon_h1_small}
