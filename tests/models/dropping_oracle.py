"""Token dropping the obvious way: transformers' own model with an explicit mask.

Everything is computed at once over prompt and answer; what a token after the prompt may not
read any more is masked, layer by layer and head by head.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.modeling_utils import AttentionInterface

from tests.models.harness import tiny_module

NAME = "kvell_dropping_oracle"
OBSERVING, POOLED = 8, 7


@dataclass
class Oracle:
    """One prompt and what its layers keep."""

    architecture: str
    budgets: Mapping[int, int]
    kept: dict[int, list[list[int]]] = field(default_factory=dict)
    """By layer, for each head: positions of the prompt that stay."""

    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Before each output token: [outputs, vocab]."""
        AttentionInterface.register(NAME, self._attend)
        module = copy.deepcopy(tiny_module(self.architecture))
        module.set_attn_implementation(NAME)
        self._prompt_tokens = len(prompt)
        with torch.inference_mode():
            known = torch.tensor([[*prompt, *output]])
            logits: torch.Tensor = module(known, use_cache=False).logits[0]
        return logits[len(prompt) - 1 : -1]

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        group = query.shape[1] // key.shape[1]
        k, v = (x[0].repeat_interleave(group, 0) for x in (key, value))
        scores = query[0] @ k.transpose(1, 2) * (scaling or query.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        readable = self._causal(query.shape[2], sliding_window)
        plain = _weights(scores.masked_fill(~readable, -torch.inf), s_aux)
        source = getattr(module, "kv_shared_layer_index", None)
        layer = int(module.layer_idx if source is None else source)
        budget = self.budgets.get(layer)
        if budget is None or budget >= self._prompt_tokens:
            return (plain @ v).transpose(0, 1)[None], None
        # Latents are expanded to a head for each query head, but stored, and kept, as one.
        heads = 1 if hasattr(module, "kv_lora_rank") else key.shape[1]
        if source is None:
            self.kept[layer] = self._choose(plain, heads, budget)
        kept = self.kept[layer]
        allowed = readable.expand(len(scores), -1, -1).clone()
        for head, positions in enumerate(kept):
            gone = [j for j in range(self._prompt_tokens) if j not in positions]
            own = slice(head * len(scores) // heads, (head + 1) * len(scores) // heads)
            allowed[own, self._prompt_tokens :, gone] = False
        dropped = _weights(scores.masked_fill(~allowed, -torch.inf), s_aux)
        return (dropped @ v).transpose(0, 1)[None], None

    def _causal(self, tokens: int, window: int | None) -> torch.Tensor:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        return (distance >= 0) & (distance < (window or tokens + 1))

    def _choose(self, weights: torch.Tensor, heads: int, budget: int) -> list[list[int]]:
        end = self._prompt_tokens
        paid = weights[:, end - OBSERVING : end, :end].sum(1)
        return [_best(votes, budget) for votes in paid.view(heads, -1, end).sum(1).tolist()]


def _best(votes: list[float], budget: int) -> list[int]:
    """The best by the largest vote around, the earlier of equals; and all that observe."""
    earlier, reach = len(votes) - OBSERVING, POOLED // 2
    around = [max(votes[max(0, j - reach) : min(earlier, j + reach + 1)]) for j in range(earlier)]
    best = sorted(range(earlier), key=lambda j: (-around[j], j))[: budget - OBSERVING]
    return sorted(best) + list(range(earlier, len(votes)))


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    columns = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    return torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
