"""Estimate of the memory of transformers' own forward pass, without weights and KV."""

from collections.abc import Sequence
from typing import Any

from kvell.elastic.arena import ActivationModel
from kvell.models.config.config_fields import architecture, optional_size, text_config
from kvell.models.config.json_files import MALFORMED, REPAIR_CONFIG, read_by_library
from kvell.models.config.multimodal import MOST_GRID_TOKENS
from kvell.vocabulary import MIB

FIXED_BYTES = 32 * MIB
"""Library scratch: oneDNN's packed copies and thread-local buffers."""
HIDDEN_COPIES = 12
"""Hidden-size rows alive at the widest point of a layer, some of them in float32."""
INTERMEDIATE_COPIES = 3
"""Gate, up and their product."""
PROJECTED_COPIES = 4
"""Rows of the text's hidden size kept alive by a projector and by packing its output."""
CHANNELS = 3


def activation_model(config: Any) -> ActivationModel:
    """Return the model behind the fixed reserve, from a config alone; counts in float32.

    :raises ChangeSomething: if a field of the config is malformed.
    """
    with read_by_library(architecture(config), MALFORMED, REPAIR_CONFIG):
        text = text_config(config)
        hidden = int(text.hidden_size) * (optional_size(text, ("altup_num_inputs",)) or 1)
        intermediate = _widest(getattr(text, "intermediate_size", None)) or 4 * hidden
        return ActivationModel(
            fixed_bytes=FIXED_BYTES + encoder_bytes(config),
            token_bytes=4
            * (HIDDEN_COPIES * hidden + INTERMEDIATE_COPIES * intermediate + _latent_numbers(text)),
            logits_row_bytes=2 * 4 * int(text.vocab_size),
        )


def encoder_bytes(config: Any) -> int:
    """Return the bytes to encode one image of the largest size, with the embeddings that are kept.

    All pieces of an image are encoded together, except if each is an image of its own; transformers
    keeps every layer's output. 0 for a text-only model, or an encoder whose config gives no patch
    size.
    """
    vision = getattr(config, "vision_config", None)
    size = _sides(getattr(vision, "image_size", None))
    patch = _sides(getattr(vision, "patch_size", None))
    if patch is None:
        return 0
    if size is None:
        return _grid_bytes(config, vision, patch)
    height, width = size
    hidden = int(getattr(vision, "hidden_size", 0))
    inner = int(getattr(vision, "intermediate_size", 0) or 4 * hidden)
    layers = int(getattr(vision, "num_hidden_layers", 0))
    pieces = _pieces(config, vision, height)
    tokens = pieces * ((height // patch[0]) * (width // patch[1]) + 1)
    pixels = pieces * CHANNELS * height * width
    widened = 2 * int(getattr(vision, "vision_output_dim", 0))
    numbers = _layer_numbers(config, hidden, inner) + layers * hidden + widened
    return 4 * (tokens * numbers + 2 * pixels)


def _grid_bytes(config: Any, vision: Any, patch: tuple[int, int]) -> int:
    """Return the bytes for images of any size, up to ``MOST_GRID_TOKENS`` tokens."""
    merged = optional_size(vision, ("spatial_merge_size",))
    hidden = optional_size(vision, ("embed_dim", "hidden_size"))
    inner = optional_size(vision, ("intermediate_size",))
    inner = inner or optional_size(vision, ("mlp_ratio",)) * hidden
    tokens = MOST_GRID_TOKENS * merged**2
    pixels = tokens * CHANNELS * patch[0] * patch[1]
    pixels *= optional_size(vision, ("temporal_patch_size",)) or 1
    return 4 * (tokens * _layer_numbers(config, hidden, inner) + 2 * pixels)


def _layer_numbers(config: Any, hidden: int, inner: int) -> int:
    """Return the numbers per token alive at the widest point of a layer, or of the projector."""
    projected = PROJECTED_COPIES * int(text_config(config).hidden_size)
    return HIDDEN_COPIES * hidden + INTERMEDIATE_COPIES * inner + projected


def _sides(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Sequence) and len(size) == 2:
        return int(size[0]), int(size[1])
    return None


def _pieces(config: Any, vision: Any, size: int) -> int:
    """Return the most pieces of an image for an encoder; the whole image counts as one."""
    grids = getattr(config, "image_grid_pinpoints", None) or ()
    largest = max(((height // size) * (width // size) for height, width in grids), default=0)
    return int(getattr(vision, "max_num_tiles", 0)) or largest + 1


def _widest(sizes: int | Sequence[int] | None) -> int:
    return int(sizes or 0) if not isinstance(sizes, Sequence) else max(map(int, sizes))


def _latent_numbers(text: Any) -> int:
    latent_size = optional_size(text, ("kv_lora_rank",))
    if not latent_size:
        return 0
    rotary_size = optional_size(text, ("qk_rope_head_dim",))
    return int(text.num_attention_heads) * (2 * latent_size + rotary_size)
