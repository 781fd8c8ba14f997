"""Tensors of the vision towers and projectors next to a text, computed from their configs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace

from kvell.models.families.tensor_shapes import Shapes, linear_shapes, mlp_shapes, numbered_shapes


def _layer_norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _plain_mlp(name: str, hidden: int, inner: int) -> Shapes:
    up = linear_shapes(f"{name}.fc1", inner, hidden, has_bias=True)
    return up | linear_shapes(f"{name}.fc2", hidden, inner, has_bias=True)


def _siglip(vision: SimpleNamespace) -> Shapes:
    """Return SigLIP's tower, whose head pools an image to one vector."""
    hidden, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    layer = {
        **_layer_norm("layer_norm1", hidden),
        **_layer_norm("layer_norm2", hidden),
        **_plain_mlp("mlp", hidden, inner),
    }
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= linear_shapes(f"self_attn.{name}", hidden, hidden, has_bias=True)
    tensors: Shapes = {
        "embeddings.patch_embedding.weight": (hidden, vision.num_channels, patch, patch),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": ((vision.image_size // patch) ** 2, hidden),
        **numbered_shapes("encoder.layers", vision.num_hidden_layers, layer),
        **_layer_norm("post_layernorm", hidden),
    }
    if vision.vision_use_head:
        tensors |= {
            "head.probe": (1, 1, hidden),
            "head.attention.in_proj_weight": (3 * hidden, hidden),
            "head.attention.in_proj_bias": (3 * hidden,),
            **linear_shapes("head.attention.out_proj", hidden, hidden, has_bias=True),
            **_layer_norm("head.layernorm", hidden),
            **_plain_mlp("head.mlp", hidden, inner),
        }
    return {f"model.vision_tower.{name}": shape for name, shape in tensors.items()}


def _paligemma(config: SimpleNamespace) -> Shapes:
    projector = "model.multi_modal_projector.linear"
    out, width = config.projection_dim, config.vision_config.hidden_size
    return _siglip(config.vision_config) | linear_shapes(projector, out, width, has_bias=True)


def _llava_onevision(config: SimpleNamespace) -> Shapes:
    projector = "model.multi_modal_projector"
    bias = bool(config.multimodal_projector_bias)
    hidden, width = config.text_config.hidden_size, config.vision_config.hidden_size
    chosen = config.vision_feature_layer
    width *= 1 if isinstance(chosen, int) else len(chosen)
    return {
        **_siglip(config.vision_config),
        **linear_shapes(f"{projector}.linear_1", hidden, width, bias),
        **linear_shapes(f"{projector}.linear_2", hidden, hidden, bias),
        "model.image_newline": (hidden,),
    }


def _internvl_tower(vision: SimpleNamespace) -> Shapes:
    """Return InternVL's tower, whose layers scale their outputs."""
    hidden, channels = vision.hidden_size, vision.num_channels
    has_bias = bool(vision.attention_bias)
    layer = {
        **_layer_norm("layernorm_before", hidden),
        **_layer_norm("layernorm_after", hidden),
        **_plain_mlp("mlp", hidden, vision.intermediate_size),
        **linear_shapes("attention.projection_layer", hidden, hidden, has_bias=True),
        "lambda_1": (hidden,),
        "lambda_2": (hidden,),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        layer |= linear_shapes(f"attention.{name}", hidden, hidden, has_bias)
    height, width = vision.image_size
    rows, columns = vision.patch_size
    places = (height // rows) * (width // columns) + 1
    tensors: Shapes = {
        "embeddings.cls_token": (1, 1, hidden),
        "embeddings.position_embeddings": (1, places, hidden),
        "embeddings.patch_embeddings.projection.weight": (hidden, channels, rows, columns),
        "embeddings.patch_embeddings.projection.bias": (hidden,),
        **numbered_shapes("encoder.layer", vision.num_hidden_layers, layer),
    }
    return {f"model.vision_tower.{name}": shape for name, shape in tensors.items()}


def _internvl(config: SimpleNamespace) -> Shapes:
    projector = "model.multi_modal_projector"
    hidden = config.text_config.hidden_size
    width = config.vision_config.hidden_size * int(1 / config.downsample_ratio) ** 2
    return {
        **_internvl_tower(config.vision_config),
        **_layer_norm(f"{projector}.layer_norm", width),
        **linear_shapes(f"{projector}.linear_1", hidden, width, has_bias=True),
        **linear_shapes(f"{projector}.linear_2", hidden, hidden, has_bias=True),
    }


def _mllama_tower(vision: SimpleNamespace) -> Shapes:
    """Return Llama 3.2's tower: layers for each tile, then layers with gates for all tiles."""
    hidden, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    layer = {
        **_layer_norm("input_layernorm", hidden),
        **_layer_norm("post_attention_layernorm", hidden),
        **_plain_mlp("mlp", hidden, inner),
    }
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer |= linear_shapes(f"self_attn.{name}", hidden, hidden)
    gated = layer | {"gate_attn": (1,), "gate_ffn": (1,)}
    places = (vision.image_size // patch) ** 2 + 1
    tiles = vision.max_num_tiles
    ratios = len(vision.supported_aspect_ratios) + 1
    tensors: Shapes = {
        "class_embedding": (hidden,),
        "patch_embedding.weight": (hidden, vision.num_channels, patch, patch),
        "gated_positional_embedding.gate": (1,),
        "gated_positional_embedding.embedding": (places, hidden),
        "gated_positional_embedding.tile_embedding.weight": (ratios, tiles * places * hidden),
        **_layer_norm("layernorm_pre", hidden),
        **_layer_norm("layernorm_post", hidden),
        **numbered_shapes("transformer.layers", vision.num_hidden_layers, layer),
        **numbered_shapes("global_transformer.layers", vision.num_global_layers, gated),
    }
    for name in ("pre_tile_positional_embedding", "post_tile_positional_embedding"):
        tensors |= {f"{name}.gate": (1,), f"{name}.embedding.weight": (ratios, tiles * hidden)}
    return {f"model.vision_model.{name}": shape for name, shape in tensors.items()}


def _mllama(config: SimpleNamespace) -> Shapes:
    out, width = config.text_config.hidden_size, config.vision_config.vision_output_dim
    projector = linear_shapes("model.multi_modal_projector", out, width, has_bias=True)
    return _mllama_tower(config.vision_config) | projector


def _grid_tower(
    vision: SimpleNamespace, hidden: int, out: int, layer: Shapes, norm: Shapes
) -> Shapes:
    """Return a tower for images of any size, which merges neighbouring patches at its end."""
    patch = vision.patch_size
    merged = hidden * vision.spatial_merge_size**2
    pixels = (vision.in_channels, vision.temporal_patch_size, patch, patch)
    attention = linear_shapes("attn.qkv", 3 * hidden, hidden, has_bias=True)
    attention |= linear_shapes("attn.proj", hidden, hidden, has_bias=True)
    tensors: Shapes = {
        "patch_embed.proj.weight": (hidden, *pixels),
        **numbered_shapes("blocks", vision.depth, attention | layer),
        **{f"merger.{name}": shape for name, shape in norm.items()},
        **linear_shapes("merger.mlp.0", merged, merged, has_bias=True),
        **linear_shapes("merger.mlp.2", out, merged, has_bias=True),
    }
    return {f"model.visual.{name}": shape for name, shape in tensors.items()}


def _qwen2_vl(config: SimpleNamespace) -> Shapes:
    vision = config.vision_config
    hidden = vision.embed_dim
    mlp = _plain_mlp("mlp", hidden, hidden * vision.mlp_ratio)
    layer = mlp | _layer_norm("norm1", hidden) | _layer_norm("norm2", hidden)
    return _grid_tower(vision, hidden, vision.hidden_size, layer, _layer_norm("ln_q", hidden))


def _qwen2_5_vl(config: SimpleNamespace) -> Shapes:
    vision = config.vision_config
    hidden = vision.hidden_size
    layer = mlp_shapes("mlp", hidden, vision.intermediate_size, has_bias=True)
    layer |= {"norm1.weight": (hidden,), "norm2.weight": (hidden,)}
    norm: Shapes = {"ln_q.weight": (hidden,)}
    return _grid_tower(vision, hidden, vision.out_hidden_size, layer, norm)


BESIDE_TEXT: Mapping[str, Callable[[SimpleNamespace], Shapes]] = MappingProxyType(
    {
        "internvl": _internvl,
        "llava_onevision": _llava_onevision,
        "mllama": _mllama,
        "paligemma": _paligemma,
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen2_vl": _qwen2_vl,
    }
)
"""Tensors of a model besides its text's, by model type."""
