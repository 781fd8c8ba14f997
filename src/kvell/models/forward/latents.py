"""Latent attention (MLA): pages hold each token's latent, not the heads expanded from it.

transformers' code computes queries, latents and rotary parts as usual. Where it would expand a
latent into keys and values of every head, our code passes the latent on. The expanding matrices
move to the other side of the scores: W_UK is applied to the query before attention, W_UV to its
output. So a token's key is ``[latent, rotary part]``, one head for all queries, and its value is
the latent itself.
"""

from typing import Any

import torch

from kvell.errors import ChangeSomething
from kvell.models.config.description import ModelDescription
from kvell.pages.layout import GroupKind

_PLACE = "kvell_latents"
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_heads")


class Latents:
    """The two matrices of one attention module that expand a latent.

    :param module: an attention module of transformers with ``expand_kv`` and ``kv_b_proj``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.latent_size = int(module.kv_lora_rank)
        self._key_size = int(module.qk_nope_head_dim)

    def hand_on(
        self, latent: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace ``expand_kv``: [1, 1, T, latent] and [1, 1, T, rotary] → key and value."""
        return torch.cat((latent, rotary), -1), latent

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries [T, heads, key + rotary] to ones of latents, [T, heads, latent + rotary]."""
        plain, rotary = query[..., : self._key_size], query[..., self._key_size :]
        expand_key = self._expand()[:, : self._key_size]
        absorbed = torch.einsum("thk,hkr->thr", plain, expand_key)
        return torch.cat((absorbed, rotary), -1)

    def expand(self, output: torch.Tensor) -> torch.Tensor:
        """Expand attention's output: [T, heads, latent] → [T, heads, value]."""
        return torch.einsum("thr,hvr->thv", output, self._expand()[:, self._key_size :])

    def _expand(self) -> torch.Tensor:
        """Return both expanding matrices, [heads, key + value, latent]."""
        weight: torch.Tensor = self._module.kv_b_proj.weight
        return weight.view(int(self._module.num_heads), -1, self.latent_size)


def latents_of(module: Any) -> Latents | None:
    """Return the latents of an attention module; None if :func:`place_latents` set none."""
    return getattr(module, _PLACE, None)


def place_latents(module: Any, description: ModelDescription) -> dict[int, int]:
    """Make every module of latent attention pass on its latents; return their sizes by layer.

    Only these instances are changed, not their class.

    :raises ChangeSomething: if a layer that stores latents has no such module.
    """
    placed = {}
    for child in module.modules():
        if hasattr(child, "expand_kv") and all(hasattr(child, size) for size in _SIZES):
            latents = Latents(child)
            setattr(child, _PLACE, latents)
            child.expand_kv = latents.hand_on
            placed[int(child.layer_idx)] = latents.latent_size
    wanted = {
        layer.index
        for layer in description.layers
        if layer.tensors == 1 and layer.kind in (GroupKind.FULL, GroupKind.DROPPING)
    }
    if missing := sorted(wanted ^ placed.keys()):
        raise ChangeSomething(
            "model",
            description.architecture,
            f"stores latents in layers {missing} without a module that passes them on",
            "use a model whose layers are all known to be exact",
        )
    return placed
