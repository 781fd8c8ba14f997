"""Checkpoints without a head, which serve embeddings alone.

Files of embedding models have the body of a decoder: no ``lm_head.weight``, although their config
does not tie it to the embedding. The embedding stands in for it, so that every pass has a head, and
requests for text are refused (``ModelRules.has_head``): transformers would draw a random head.
"""

import re

import torch

from kvell.models.config.config_fields import text_config
from kvell.models.fused.grouped import BlockWeight
from kvell.models.loading.weight_files import WeightMap

HEAD = "lm_head.weight"


_EMBEDDING = re.compile(r"(.+\.)?(embed_tokens|embeddings)\.weight")


def lacks_head(weights: WeightMap, config: object) -> bool:
    if any(getattr(part, "tie_word_embeddings", False) for part in (config, text_config(config))):
        return False
    has_head = any(name.endswith(HEAD) for name in weights.stored)
    return not has_head and _embedding(weights) is not None


def tensors_with_head(weights: WeightMap, config: object) -> dict[str, torch.Tensor]:
    """Map a model's tensors; the embedding is the head of a model that lacks one.

    :raises ChangeSomething: naming a file whose tensors torch cannot map.
    """
    tensors = weights.map_tensors()
    embedding = _embedding(weights)
    if embedding is not None and lacks_head(weights, config):
        tensors[HEAD] = tensors[embedding]
    return tensors


def blocks_with_head(weights: WeightMap, config: object) -> dict[str, BlockWeight]:
    """Return the weights in blocks; the embedding's are the head's of a model that lacks one."""
    blocks = weights.blocks()
    embedding = _embedding(weights)
    if embedding in blocks and lacks_head(weights, config):
        blocks[HEAD] = blocks[embedding]
    return blocks


def _embedding(weights: WeightMap) -> str | None:
    names = (name for name in weights.stored if _EMBEDDING.fullmatch(name))
    return min(names, key=len, default=None)
