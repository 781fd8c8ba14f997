"""Families of images and text whose sizes are read from a config without transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvell.models.families.sized_families import DENSE, HEADS, Fields, SizedFamily, with_omitted

_SIGLIP = SizedFamily(
    "SiglipVisionModel",
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "image_size",
        "patch_size",
        "num_channels",
    ),
    (("num_channels", 3), ("vision_use_head", True)),
)
_GRID = (("in_channels", 3), ("temporal_patch_size", 2))
_GRID_SIZES = (
    "depth",
    "hidden_size",
    "patch_size",
    "spatial_merge_size",
    "in_channels",
    "temporal_patch_size",
)
_WINDOWS = (
    ("use_sliding_window", False),
    ("sliding_window", 4096),
    ("max_window_layers", 80),
    ("layer_types", None),
)
_RATIOS = ([1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1])
_TILE_SIDES = tuple(384 * count for count in range(1, 7))
_GRIDS = tuple([height, width] for height in _TILE_SIDES for width in _TILE_SIDES)


def _equal_heads(fields: Fields) -> None:
    if fields["head_dim"] * fields["num_attention_heads"] != fields["hidden_size"]:
        fields["layer_types"] = ()


def _crossed(fields: Fields) -> None:
    if fields.get("cross_attention_layers") is None:
        fields["cross_attention_layers"] = [*range(3, 40, 5)]
    _equal_heads(fields)


def _tiles(fields: Fields) -> None:
    if fields["supported_aspect_ratios"] is None:
        fields["supported_aspect_ratios"] = _RATIOS


def _sides(fields: Fields) -> None:
    for name in ("image_size", "patch_size"):
        if isinstance(fields[name], int):
            fields[name] = [fields[name]] * 2


def _last_windows(fields: Fields) -> None:
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    first = fields["max_window_layers"] if fields["sliding_window"] else None
    if fields["layer_types"] is None:
        fields["layer_types"] = [
            "full_attention" if first is None or index < first else "sliding_attention"
            for index in range(fields["num_hidden_layers"])
        ]
    _equal_heads(fields)


def _plain_positions(text: Fields) -> Fields:
    ropes = text.get("rope_scaling")
    if isinstance(ropes, dict) and ropes.get("rope_type", ropes.get("type")) == "mrope":
        return text | {"rope_scaling": {"rope_type": "default"}}
    return text


def _unchanged(text: Fields) -> Fields:
    return text


@dataclass(frozen=True)
class SizedImages:
    """How the config of a family of images and text is completed.

    :param texts: model types of the text.
    :param defaults: transformers' defaults of the whole config's fields.
    :param text: how the text is completed; None for the text of a fused family.
    :param is_tied_by_text: whether the text's ``tie_word_embeddings`` counts too.
    :param is_flat: whether published files have the text's fields next to the vision's config.
    :param needed: sizes that the whole config must give.
    :param read_text: changes the text's fields before they are completed.
    """

    architecture: str
    texts: tuple[str, ...]
    vision: SizedFamily
    defaults: tuple[tuple[str, object], ...]
    text: SizedFamily | None = None
    is_tied_by_text: bool = False
    is_flat: bool = False
    needed: tuple[str, ...] = ()
    read_text: Callable[[Fields], Fields] = _unchanged


_UNTIED = (("tie_word_embeddings", False),)
_GRID_TEXT = SizedFamily("Qwen2_5_VLForCausalLM", (*DENSE, *HEADS), _WINDOWS, derive=_last_windows)
_QWEN2_5_VL = SizedImages(
    "Qwen2_5_VLForConditionalGeneration",
    ("qwen2_5_vl_text",),
    SizedFamily(
        "Qwen2_5_VLVisionModel",
        (*_GRID_SIZES, "intermediate_size", "out_hidden_size"),
        _GRID,
    ),
    _UNTIED,
    _GRID_TEXT,
    is_tied_by_text=True,
    is_flat=True,
    read_text=_plain_positions,
)

SIZED_IMAGES: Mapping[str, SizedImages] = MappingProxyType(
    {
        "internvl": SizedImages(
            "InternVLForConditionalGeneration",
            ("qwen2", "llama", "qwen3"),
            SizedFamily(
                "InternVLVisionModel",
                ("hidden_size", "intermediate_size", "num_hidden_layers", "num_channels"),
                (
                    ("num_channels", 3),
                    ("image_size", 448),
                    ("patch_size", 14),
                    ("attention_bias", False),
                ),
                (
                    ("norm_type", "layer_norm"),
                    ("use_mask_token", False),
                    ("use_qk_norm", False),
                    ("use_mean_pooling", True),
                    ("use_absolute_position_embeddings", True),
                ),
                _sides,
            ),
            (("tie_word_embeddings", True), ("downsample_ratio", 0.5)),
        ),
        "llava_onevision": SizedImages(
            "LlavaOnevisionForConditionalGeneration",
            ("qwen2",),
            _SIGLIP,
            (
                *_UNTIED,
                ("image_grid_pinpoints", None),
                ("vision_feature_layer", -1),
                ("multimodal_projector_bias", True),
            ),
            is_tied_by_text=True,
        ),
        "mllama": SizedImages(
            "MllamaForConditionalGeneration",
            ("mllama_text_model",),
            SizedFamily(
                "MllamaVisionModel",
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "image_size",
                    "num_global_layers",
                    "patch_size",
                    "num_channels",
                    "vision_output_dim",
                ),
                (("num_channels", 3), ("supported_aspect_ratios", None)),
                (("max_num_tiles", 4),),
                _tiles,
            ),
            _UNTIED,
            SizedFamily("MllamaForCausalLM", (*DENSE, *HEADS), derive=_crossed),
        ),
        "paligemma": SizedImages(
            "PaliGemmaForConditionalGeneration",
            ("gemma", "gemma2"),
            _SIGLIP,
            (("tie_word_embeddings", True), ("projection_dim", 2048)),
            needed=("projection_dim",),
        ),
        "qwen2_5_vl": _QWEN2_5_VL,
        "qwen2_vl": replace(
            _QWEN2_5_VL,
            architecture="Qwen2VLForConditionalGeneration",
            texts=("qwen2_vl_text",),
            vision=SizedFamily(
                "Qwen2VLVisionModel", (*_GRID_SIZES, "embed_dim", "mlp_ratio"), _GRID
            ),
            text=replace(_GRID_TEXT, architecture="Qwen2VLForCausalLM"),
        ),
    }
)
"""Families by model type; ``vision_weights.BESIDE_TEXT`` has their tensors."""


def images_of(raw: Mapping[str, object]) -> SizedImages | None:
    """Return the family of a config of images and text; None for any other."""
    images = SIZED_IMAGES.get(str(raw.get("model_type")))
    return images if images and raw.get("architectures") == [images.architecture] else None


def whole_fields(images: SizedImages, raw: Mapping[str, object]) -> Fields:
    whole = dict(images.defaults) | dict(raw)
    if "image_grid_pinpoints" in whole and whole["image_grid_pinpoints"] is None:
        whole["image_grid_pinpoints"] = _GRIDS
    return whole


def text_fields(images: SizedImages, raw: Mapping[str, object]) -> Fields | None:
    """Return the text's part of a config, with its type; None if it is not known here."""
    given = raw.get("text_config")
    if given is None and images.is_flat:
        outer = ("architectures", "model_type", "quantization_config", "vision_config")
        given = {name: value for name, value in raw.items() if name not in outer}
    if not isinstance(given, dict):
        return None
    text = {"model_type": images.texts[0]} | given
    return images.read_text(text) if text["model_type"] in images.texts else None


def vision_fields(images: SizedImages, raw: Mapping[str, object]) -> Fields | None:
    """Return the tower's part of a config with fields that it omits; None if not known here."""
    given = raw.get("vision_config")
    if not isinstance(given, dict):
        return None
    if images.vision is _SIGLIP and given.get("model_type", "") not in ("", "siglip_vision_model"):
        return None
    return with_omitted(images.vision, given)


def is_tied(images: SizedImages, whole: Fields, text: Fields) -> bool:
    by_text = images.is_tied_by_text and text.get("tie_word_embeddings")
    return bool(whole["tie_word_embeddings"] or by_text)
