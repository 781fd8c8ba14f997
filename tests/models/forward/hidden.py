from typing import Any

import torch


def last_hidden_state(module: Any, ids: list[int]) -> torch.Tensor:
    """transformers' own, float32 [tokens, hidden]."""
    base = module.base_model
    if base is module:  # it names no base, or has none of its own kind
        base = getattr(module, "model", None) or module.backbone
    with torch.inference_mode():
        told = base(input_ids=torch.tensor([ids]), use_cache=False)
    hidden: torch.Tensor = getattr(told, "last_hidden_state", told)[0]
    return hidden.float()
