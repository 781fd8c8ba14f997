"""The four shapes scaled down; the layers that have a window or a state stay the same.

Windows and prompts shrink together, so that a prompt is as many windows long as at full size.
"""

from typing import Any

from bench.engine.pressure.cases import Case

VOCAB_SIZE = 8_192
CASES = (
    Case("gemma3-27b", (750, 1_250), 64, 24, "a window of 64, of 1,024"),
    Case("ministral-8b", (430, 860), 64, 24, "a window of 256, of 32,768"),
    Case("gpt-oss-20b", (750, 1_250), 64, 24, "a window of 16, of 128"),
    Case("falcon-h1-7b", (66, 197), 48, 24, "a state of 1,024 tokens, of 1,557"),
)


def config_of(shape: str) -> Any:
    """A transformers config of a case's shape."""
    return _CONFIGS[shape]()


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=64,
        max_position_embeddings=8192,
        query_pre_attn_scalar=64,
        architectures=["Gemma3ForCausalLM"],
    )


def _ministral() -> Any:
    from transformers import MinistralConfig

    layers = 12
    return MinistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        sliding_window=256,
        layer_types=["sliding_attention" if i % 4 else "full_attention" for i in range(layers)],
        max_position_embeddings=8192,
        architectures=["MinistralForCausalLM"],
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    layers = 8
    return GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        architectures=["GptOssForCausalLM"],
    )


def _falcon_h1() -> Any:
    from transformers import FalconH1Config

    return FalconH1Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        mamba_d_ssm=1024,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=256,
        mamba_n_groups=1,
        max_position_embeddings=8192,
        architectures=["FalconH1ForCausalLM"],
    )


_CONFIGS = {
    "gemma3-27b": _gemma3,
    "ministral-8b": _ministral,
    "gpt-oss-20b": _gpt_oss,
    "falcon-h1-7b": _falcon_h1,
}
