"""transformers' own forward pass over keys and values that were rounded as pages round them."""

import copy
import sys
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvell.attention.quantised import dequantise, is_quantised, quantise


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not is_quantised(dtype):
        return vectors.to(dtype).to(vectors.dtype)
    return dequantise(quantise(vectors, dtype), dtype).to(vectors.dtype)


def quantising(module: Any, dtype: torch.dtype) -> Any:
    """A copy whose eager attention reads rounded keys and values (latents, where it has them)."""
    copied = copy.deepcopy(module)
    name = f"quantising-{dtype}"
    AttentionInterface.register(name, _attention(dtype))
    AttentionMaskInterface.register(name, eager_mask)
    copied.set_attn_implementation(name)
    for child in copied.modules():
        if hasattr(child, "expand_kv"):
            child.expand_kv = _expanding(child.expand_kv, dtype)
    return copied


def _attention(dtype: torch.dtype) -> Any:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        if not hasattr(module, "expand_kv"):
            key, value = rounded(key, dtype), rounded(value, dtype)
        return eager(module, query, key, value, mask, **rest)

    return attention


def _expanding(expand: Any, dtype: torch.dtype) -> Any:
    def expand_rounded(latent: torch.Tensor, rotary: torch.Tensor) -> Any:
        whole = rounded(torch.cat((latent, rotary), -1), dtype)
        size = latent.shape[-1]
        return expand(whole[..., :size], whole[..., size:])

    return expand_rounded
