"""Decoders whose layers have attention heads and Mamba heads side by side, for transformers.

::

    hidden ─ norm ─┬─ attention ─ norm ─┐
                   └─ Mamba ───── norm ─┴─ mean ─ + hidden ─ norm ─ MLP ─ + …

Both read the same normed input; their outputs are normalised, scaled by a learnt vector each and
averaged (Hymba, eq. 3).  Neighbouring layers may share keys and values (§2.3).  The parts are
transformers' own; only their composition is ours.
"""

from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from kvell.models.config.layer_kinds import reused_layers
from kvell.models.config.parallel_heads_config import WINDOWED, ParallelHeadsConfig

KeysValues = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values computed in this pass, by layer; [1, heads, T, head_size] each."""


class ParallelHeadsAttention(nn.Module):
    """Grouped-query attention whose keys and values may be an earlier layer's."""

    def __init__(self, config: ParallelHeadsConfig, layer: int, source: int | None) -> None:
        super().__init__()
        heads = config.num_attention_heads
        kv_heads = int(config.num_key_value_heads or 0)
        size = int(config.head_dim or 0)
        self.config, self.layer_idx, self.source = config, layer, source
        self.head_dim = size
        self.num_key_value_groups = heads // kv_heads
        assert config.layer_types is not None
        self.sliding_window = (
            config.sliding_window if config.layer_types[layer] == WINDOWED else None
        )
        self.q_proj = nn.Linear(config.hidden_size, heads * size, bias=False)
        if source is None:
            self.k_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
            self.v_proj = nn.Linear(config.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        stored: KeysValues,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Map [1, T, hidden] → the same; add the layer's keys and values to ``stored``."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(shape).transpose(1, 2)
        key = query if self.source is not None else self.k_proj(hidden).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rope)
        if self.source is None:
            stored[self.layer_idx] = (key, self.v_proj(hidden).view(shape).transpose(1, 2))
        key, value = stored[self.layer_idx if self.source is None else self.source]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        window = self.sliding_window
        output, _ = attend(
            self,
            query,
            key,
            value,
            mask,
            scaling=self.head_dim**-0.5,
            sliding_window=window,
            **kwargs,
        )
        projected: torch.Tensor = self.o_proj(output.reshape(*hidden.shape[:-1], -1))
        return projected


class ParallelHeadsLayer(nn.Module):
    """Attention and Mamba side by side, then an MLP."""

    def __init__(self, config: ParallelHeadsConfig, layer: int, source: int | None) -> None:
        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps=epsilon)
        self.self_attn = ParallelHeadsAttention(config, layer, source)
        self.mamba = JambaMambaMixer(config, layer)
        self.attention_norm = LlamaRMSNorm(size, eps=epsilon)
        self.mamba_norm = LlamaRMSNorm(size, eps=epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=epsilon)
        self.mlp = LlamaMLP(config)
        self.window_tokens = self.self_attn.sliding_window

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Map [1, T, hidden] → the same; ``kwargs`` are for :class:`ParallelHeadsAttention`."""
        normed = self.input_layernorm(hidden)
        attended = self.attention_norm(self.self_attn(normed, **kwargs))
        hidden = hidden + (attended + self.mamba_norm(self.mamba(normed))) / 2
        mixed: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class ParallelHeadsModel(LlamaPreTrainedModel):  # type: ignore[misc]
    """Embeddings, layers, and a norm."""

    config_class = ParallelHeadsConfig

    def __init__(self, config: ParallelHeadsConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        sources = reused_layers(config)
        self.layers = nn.ModuleList(
            ParallelHeadsLayer(config, layer, sources.get(layer))
            for layer in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Map token ids [1, T] → hidden states [1, T, hidden]."""
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        seen = {
            "config": self.config,
            "inputs_embeds": hidden,
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": position_ids,
        }
        masks: dict[int | None, Any] = {None: create_causal_mask(**seen)}
        masks[self.config.sliding_window] = create_sliding_window_causal_mask(**seen)
        rope = self.rotary_emb(hidden, position_ids)
        stored = KeysValues()
        for layer in cast(list[ParallelHeadsLayer], self.layers):
            mask = masks[layer.window_tokens]
            hidden = layer(hidden, rope=rope, mask=mask, stored=stored, **kwargs)
        normed: torch.Tensor = self.norm(hidden)
        return normed


class ParallelHeadsForCausalLM(LlamaPreTrainedModel):  # type: ignore[misc]
    """The decoder with a language model's head; keeps no cache of its own."""

    config_class = ParallelHeadsConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ParallelHeadsConfig) -> None:
        super().__init__(config)
        self.model = ParallelHeadsModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: None = None,
        use_cache: bool = False,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Map token ids [1, T] → logits [1, rows, vocab], with transformers' signature."""
        if past_key_values is not None or use_cache:
            raise ValueError("a cache of transformers' own is not served")
        hidden = self.model(input_ids, position_ids, **kwargs)
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, rows, :]))


AutoModelForCausalLM.register(ParallelHeadsConfig, ParallelHeadsForCausalLM, exist_ok=True)
