"""Tiny configs of families whose attention is neither plain nor only windowed."""

from typing import Any

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
"""A token stores 24 + 8 numbers where its expanded heads would store 4 × (24 + 32)."""

SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 509,
    "hidden_size_per_layer_input": 8,
}

LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV2ForCausalLM": (
        "DeepseekV2Config",
        LATENT | {"q_lora_rank": None, "n_routed_experts": 4, "n_shared_experts": 1},
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        LATENT | {"q_lora_rank": 20, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "Glm4MoeLiteForCausalLM": (
        "Glm4MoeLiteConfig",
        LATENT | {"q_lora_rank": 20, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
    "MiniCPM3ForCausalLM": (
        "MiniCPM3Config",
        {k: v for k, v in LATENT.items() if "expert" not in k and "moe" not in k}
        | {"q_lora_rank": 20},
    ),
    "YoutuForCausalLM": ("YoutuConfig", LATENT | {"q_lora_rank": 20}),
}

CHUNKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 9,
            "layer_types": [CHUNKED, FULL, CHUNKED],
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
}

SHARES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3nForCausalLM": (
        "Gemma3nTextConfig",
        SHARED
        | {
            "num_kv_shared_layers": 3,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
        },
    ),
    "Gemma4ForCausalLM": (
        "Gemma4TextConfig",
        SHARED | {"num_kv_shared_layers": 2, "global_head_dim": 24},
    ),
}

VARIANTS = LATENTS | CHUNKS | SHARES
