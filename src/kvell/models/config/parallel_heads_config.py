"""The config of decoders whose layers have attention heads and Mamba heads side by side.

Follows Hymba (Dong and others 2024, §2); transformers has no such class.  Hymba's meta tokens
(learnt embeddings before every prompt that stay in every window) are not included.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING
from transformers.models.llama.configuration_llama import LlamaConfig

MODEL_TYPE = "parallel_heads"
GLOBAL, WINDOWED = "hybrid", "hybrid_sliding"


@strict
class ParallelHeadsConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's fields, a window, and the fields of the Mamba heads, under Hymba's names.

    :param global_attn_idx: layers of full attention; all others have the window.
    :param kv_reuse_group: groups of layers that share the keys and values of their first layer.
    :param mamba_dt_rank: rank of the projection to step sizes; 0 for a sixteenth of the hidden
        size, rounded up.
    """

    model_type = MODEL_TYPE

    sliding_window: int = 1024
    global_attn_idx: list[int] | None = None
    kv_reuse_group: list[list[int]] | None = None
    layer_types: list[str] | None = None
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 0
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    use_mamba_kernels: bool = True
    use_mambapy: bool = False
    use_associative_scan: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        full = frozenset(self.global_attn_idx or ())
        self.layer_types = [
            GLOBAL if i in full else WINDOWED for i in range(self.num_hidden_layers)
        ]
        self.mamba_dt_rank = self.mamba_dt_rank or -(-self.hidden_size // 16)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Check that layers that share keys and values exist and have the same window.

        :raises ValueError: if a group names a layer that does not exist, or has layers of both
            kinds.
        """
        super().validate_architecture()
        types = self.layer_types or []
        for group in self.kv_reuse_group or ():
            missing = [layer for layer in group if not 0 <= layer < len(types)]
            if missing:
                problem = f"kv_reuse_group names layer {missing[0]}, which does not exist"
                raise ValueError(f"{problem}: use layers 0 to {len(types) - 1}")
            if len({types[layer] for layer in group}) > 1:
                raise ValueError(f"layers {group} of kv_reuse_group have different windows")


CONFIG_MAPPING.register(MODEL_TYPE, ParallelHeadsConfig, exist_ok=True)
