"""Families with experts whose sizes are read from a config without transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

Fields = dict[str, Any]
_DECODER = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)
_LATENT = tuple(
    (
        "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim first_k_dense_replace "
        "intermediate_size moe_intermediate_size n_routed_experts n_shared_experts"
    ).split()
)
_DELTA = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "shared_expert_intermediate_size",
)


def _set_types(
    fields: Fields, is_full: Callable[[int], bool], other: str = "linear_attention"
) -> None:
    """Set the layers' types by their indices, unless the file gives them."""
    if fields.get("layer_types") is None:
        fields["layer_types"] = [
            "full_attention" if is_full(index) else other
            for index in range(fields["num_hidden_layers"])
        ]


def _by_period(fields: Fields) -> None:
    period, offset = fields["attn_layer_period"], fields["attn_layer_offset"]
    fields["layer_types"] = None
    _set_types(fields, lambda index: bool(index % period == offset))
    if fields["mamba_dt_rank"] == "auto":
        fields["mamba_dt_rank"] = -(-fields["hidden_size"] // 16)


def _by_index(fields: Fields) -> None:
    chosen = fields.get("attn_layer_indices") or ()
    fields["layer_types"] = None
    _set_types(fields, lambda index: index in chosen)
    _mamba2_heads(fields)


def _by_pattern(fields: Fields) -> None:
    """Read the letters of a pattern; other letters stay, and are refused as unknown types."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    if pattern := str(fields.get("hybrid_override_pattern") or ""):
        letters = pattern[: fields["num_hidden_layers"] + 1]
        fields["layers_block_type"] = [kinds.get(letter, letter) for letter in letters]
    fields["layer_types"] = fields.get("layers_block_type") or ()


def _side_by_side(fields: Fields) -> None:
    fields["layer_types"] = ["hybrid"] * fields["num_hidden_layers"]
    _mamba2_heads(fields)


def _mamba2_heads(fields: Fields) -> None:
    if fields["mamba_d_head"] == "auto":
        inner = fields.get("mamba_d_ssm") or fields["mamba_expand"] * fields["hidden_size"]
        fields["mamba_d_head"] = inner // fields["mamba_n_heads"]


def _dense_first(fields: Fields) -> None:
    kinds = fields.get("mlp_layer_types") or ["dense"]
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    fields["first_k_dense_replace"] = first if "sparse" not in kinds[:first] else 0
    if "dense" in kinds[first:]:
        fields["layer_types"] = ()


def _chunked(fields: Fields) -> None:
    count, step = fields["num_hidden_layers"], fields["interleave_moe_layer_step"]
    rotates = fields["no_rope_layers"] or [
        int((index + 1) % fields["no_rope_layer_interval"] != 0) for index in range(count)
    ]
    if fields.get("moe_layers") is None:
        fields["moe_layers"] = list(range(step - 1, count, step))
    _set_types(fields, lambda index: not rotates[index], "chunked_attention")


def _all_states(fields: Fields) -> None:
    fields["layer_types"] = ["linear_attention"] * fields["num_hidden_layers"]


def _states_alone(fields: Fields) -> None:
    _all_states(fields)
    rank = fields.get("time_step_rank")
    if rank in (None, "auto"):
        fields["time_step_rank"] = -(-fields["hidden_size"] // 16)
    fields["intermediate_size"] = int(fields["expand"] * fields["hidden_size"])


def _convolutions(fields: Fields) -> None:
    chosen = fields.get("full_attn_idxs")
    _set_types(fields, lambda index: chosen is None or index in chosen, "conv")
    fields["intermediate_size"] = fields.get("block_ff_dim") or fields["intermediate_size"]
    fields["tie_word_embeddings"] = fields.get("tie_embedding", fields["tie_word_embeddings"])


def _last_of_pattern(fields: Fields) -> None:
    """Make every n-th layer full, by a pattern's length; all, without a window."""
    length = fields["sliding_window_pattern"]
    if isinstance(length, str):
        length = len(length)
    windowed = bool(fields.get("sliding_window") and length)
    _set_types(fields, lambda index: not (windowed and (index + 1) % length), "sliding_attention")


def _unchanged(_fields: Fields) -> None:
    """Derive no field."""


def _alternating(fields: Fields) -> None:
    _set_types(fields, lambda index: index % 2 == 1, "sliding_attention")


def _every_fourth(fields: Fields) -> None:
    interval = fields.get("full_attention_interval") or 4
    _set_types(fields, lambda index: (index + 1) % interval == 0)


def _shared_attention(fields: Fields) -> None:
    """Set sizes of heads; refuse heads that do not divide the inner size, and unknown types."""
    wide = 2 * fields["hidden_size"]
    fields["head_dim"] = wide // fields["num_attention_heads"]
    inner = fields["mamba_expand"] * fields["hidden_size"]
    heads = fields["n_mamba_heads"]
    fields.setdefault("mamba_headdim", inner // heads)
    fields["layer_types"] = fields.get("layers_block_type") or ()
    given = fields.get("attention_head_dim") or fields["head_dim"]
    kinds = fields["layer_types"]
    is_known = set(kinds) <= {"mamba", "linear_attention", "hybrid"}
    hybrids = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    is_known = is_known and fields.get("hybrid_layer_ids", hybrids) == hybrids
    if not is_known or given != fields["head_dim"] or fields["mamba_headdim"] * heads != inner:
        fields["layer_types"] = ()


def _every_fifth(fields: Fields) -> None:
    """Make every fifth layer full, and refuse what no model is built of.

    That is a list without a size for each layer, or shared keys that no earlier layer has.
    """
    count = fields["num_hidden_layers"]
    _set_types(fields, lambda index: index % 5 == 4, "sliding_attention")
    lists = (fields["intermediate_size"], fields.get("activation_sparsity_pattern"))
    is_whole = all(not isinstance(sizes, list) or len(sizes) == count for sizes in lists)
    first = count - fields["num_kv_shared_layers"]
    is_whole = is_whole and {*fields["layer_types"][first:]} <= {*fields["layer_types"][:first]}
    if not is_whole or fields["hidden_size"] % fields["num_attention_heads"]:
        fields["layer_types"] = ()


def _kimi_layers(fields: Fields) -> None:
    """Set the layers' types and the delta rule's sizes, which published files give apart."""
    count = fields["num_hidden_layers"]
    own = fields.get("linear_attn_config") or {}
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    for name, given in (names | {"linear_conv_kernel_dim": "short_conv_kernel_size"}).items():
        fields[name] = own.get(given, fields[name])
    full = own.get("full_attn_layers")
    chosen = range(4, count, 4) if full is None else [index - 1 for index in full]
    _set_types(fields, lambda index: index in chosen)
    if fields.get("mlp_layer_types") is None:
        first = fields.get("first_k_dense_replace", 1)
        fields["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (count - first)


def _alternating_states(fields: Fields) -> None:
    _set_types(fields, lambda index: index % 2 == 0)


def _delta_sizes(fields: Fields) -> None:
    """Set the delta rule's sizes; refuse a model without layers of both kinds."""
    _every_fourth(fields)
    kinds = fields["layer_types"]
    if "full_attention" not in kinds or "linear_attention" not in kinds:
        fields["layer_types"] = ()
    heads = fields["num_attention_heads"]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if fields.get(name) is None:
            fields[name] = heads
    if fields.get("linear_key_head_dim") is None:
        fields["linear_key_head_dim"] = int(
            0.75 * fields["hidden_size"] / fields["linear_num_key_heads"]
        )
    if fields.get("linear_value_head_dim") is None:
        fields["linear_value_head_dim"] = 2 * fields["linear_key_head_dim"]


def _named_layers(fields: Fields) -> None:
    """Set the types of layers, by either name; refuse heads that do not divide the inner size."""
    _mamba2_heads(fields)
    if fields.get("layer_types") is None:
        count = fields["num_hidden_layers"]
        fields["layer_types"] = fields.get("layers_block_type") or ["linear_attention"] * count
    inner = fields["mamba_expand"] * fields["hidden_size"]
    if fields["mamba_d_head"] * fields["mamba_n_heads"] != inner:
        fields["layer_types"] = ()


def _rotated_heads(fields: Fields) -> None:
    fields["head_dim"] = fields["qk_rope_head_dim"]


def _no_window(fields: Fields) -> None:
    fields["sliding_window"] = None


@dataclass(frozen=True)
class SizedFamily:
    """How a family's config is completed.

    :param needed: sizes that the file must give, as integers above 0 (or 0 where that is a number
        of layers).
    :param defaults: transformers' defaults of the other fields that sizes depend on, where they
        are not those of ``_DEFAULTS``.
    :param plain: fields with the one value for which the sizes are known here.
    :param derive: sets fields that follow from others.
    :param aliases: sizes with the other name that some files have.
    """

    architecture: str
    needed: tuple[str, ...]
    defaults: tuple[tuple[str, object], ...] = ()
    plain: tuple[tuple[str, object], ...] = ()
    derive: Callable[[Fields], None] = _unchanged
    aliases: tuple[tuple[str, str], ...] = (("num_experts", "num_local_experts"),)


OLDER_TYPES: Mapping[str, str] = MappingProxyType(
    {"attention": "full_attention", "mamba": "linear_attention"}
)
"""Layers' types in older files, with the names that transformers gives them."""
_DEFAULTS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
_TIED = ("tie_word_embeddings", True)
_SPARSE: tuple[tuple[str, object], ...] = (("decoder_sparse_step", 1), ("mlp_only_layers", []))
HEADS = ("num_key_value_heads",)
DENSE = (*_DECODER, "intermediate_size")
"""Sizes of every decoder with one MLP in each layer."""
_MAMBA1 = (("mamba_d_state", 16), ("mamba_d_conv", 4), ("mamba_expand", 2))
_MAMBA2 = (
    ("mamba_d_conv", 4),
    ("mamba_expand", 2),
    ("mamba_n_groups", 1),
    ("mamba_d_state", 256),
    ("mamba_d_head", "auto"),
    ("mamba_conv_bias", True),
    ("mamba_proj_bias", False),
)
_EVERY_FOURTH = ("sliding_window_pattern", 4)
_FALCON_MAMBA = SizedFamily(
    "FalconMambaForCausalLM",
    ("hidden_size", "num_hidden_layers", "vocab_size"),
    (
        _TIED,
        ("use_conv_bias", True),
        ("state_size", 16),
        ("expand", 2),
        ("conv_kernel", 4),
        ("use_bias", False),
    ),
    derive=_states_alone,
)

SIZED: Mapping[str, SizedFamily] = MappingProxyType(
    {
        "arcee": SizedFamily("ArceeForCausalLM", DENSE),
        "bamba": SizedFamily(
            "BambaForCausalLM",
            (*DENSE, *HEADS, "mamba_n_heads"),
            _MAMBA2,
            derive=_by_index,
        ),
        "exaone4": SizedFamily(
            "Exaone4ForCausalLM",
            (*DENSE, *HEADS),
            (("sliding_window", 4096), _EVERY_FOURTH),
            derive=_last_of_pattern,
        ),
        "falcon_h1": SizedFamily(
            "FalconH1ForCausalLM",
            (*DENSE, "mamba_n_heads"),
            (*_MAMBA2, ("mamba_d_ssm", 1024), ("num_key_value_heads", 8)),
            (("mamba_rms_norm", False), ("projectors_bias", False)),
            _side_by_side,
        ),
        "falcon_mamba": _FALCON_MAMBA,
        "granite": SizedFamily("GraniteForCausalLM", DENSE),
        "granitemoehybrid": SizedFamily(
            "GraniteMoeHybridForCausalLM",
            (
                *DENSE,
                "num_local_experts",
                "shared_intermediate_size",
                "mamba_n_heads",
                "mamba_expand",
                "mamba_n_groups",
                "mamba_d_state",
                "mamba_d_conv",
            ),
            (*_MAMBA2[:-1], ("num_local_experts", 8), ("mamba_n_heads", 128)),
            (_MAMBA2[-1],),
            _named_layers,
        ),
        "jamba": SizedFamily(
            "JambaForCausalLM",
            (*DENSE, *HEADS, "num_experts"),
            (
                *_MAMBA1,
                ("mamba_dt_rank", "auto"),
                ("mamba_conv_bias", True),
                ("attn_layer_period", 8),
                ("attn_layer_offset", 4),
                ("expert_layer_period", 2),
                ("expert_layer_offset", 1),
            ),
            (("mamba_proj_bias", False),),
            _by_period,
        ),
        "kimi_linear": SizedFamily(
            "KimiLinearForCausalLM",
            (*DENSE, *_LATENT[:4], "moe_intermediate_size", "num_experts", "n_shared_experts"),
            (
                ("q_lora_rank", None),
                ("linear_head_dim", 128),
                ("linear_num_heads", 32),
                ("linear_conv_kernel_dim", 4),
                ("n_shared_experts", 1),
                ("max_position_embeddings", 1048576),
            ),
            derive=_kimi_layers,
            aliases=(
                ("num_experts", "num_local_experts"),
                ("n_shared_experts", "num_shared_experts"),
                ("max_position_embeddings", "model_max_length"),
            ),
        ),
        "lfm2": SizedFamily(
            "Lfm2ForCausalLM",
            (*DENSE, *HEADS),
            (
                _TIED,
                ("conv_L_cache", 3),
                ("block_multiple_of", 256),
                ("block_ffn_dim_multiplier", 1.0),
                ("block_auto_adjust_ff_dim", True),
            ),
            (("conv_bias", False),),
            _convolutions,
        ),
        "mamba": replace(_FALCON_MAMBA, architecture="MambaForCausalLM"),
        "nemotron_h": SizedFamily(
            "NemotronHForCausalLM",
            (
                *DENSE,
                *HEADS,
                "head_dim",
                "mamba_num_heads",
                "mamba_head_dim",
                "ssm_state_size",
            ),
            (
                ("conv_kernel", 4),
                ("n_groups", 8),
                ("use_conv_bias", True),
                ("mamba_ssm_cache_dtype", "float32"),
            ),
            (("use_bias", False), ("mamba_proj_bias", False)),
            _by_pattern,
        ),
        "gemma3n_text": SizedFamily(
            "Gemma3nForCausalLM",
            (
                *_DECODER,
                *HEADS,
                "head_dim",
                "hidden_size_per_layer_input",
                "laurel_rank",
                "vocab_size_per_layer_input",
                "altup_num_inputs",
                "num_kv_shared_layers",
            ),
            (
                _TIED,
                ("sliding_window", 512),
                ("laurel_rank", 64),
                ("vocab_size_per_layer_input", 262144),
                ("hidden_size_per_layer_input", 256),
                ("altup_num_inputs", 4),
                ("num_kv_shared_layers", 15),
                ("intermediate_size", 16384),
            ),
            (("attention_bias", False), ("use_bidirectional_attention", None)),
            _every_fifth,
        ),
        "glm4_moe_lite": SizedFamily(
            "Glm4MoeLiteForCausalLM",
            (*_DECODER, *_LATENT[:4], *_LATENT[5:]),
            derive=_dense_first,
        ),
        "llama4_text": SizedFamily(
            "Llama4ForCausalLM",
            (*DENSE, *HEADS, "head_dim", "num_local_experts", "intermediate_size_mlp"),
            (
                ("interleave_moe_layer_step", 1),
                ("attention_chunk_size", 8192),
                ("no_rope_layer_interval", 4),
                ("no_rope_layers", None),
                ("moe_layers", None),
            ),
            derive=_chunked,
        ),
        "lfm2_moe": SizedFamily(
            "Lfm2MoeForCausalLM",
            (*DENSE, *HEADS, "moe_intermediate_size", "num_experts", "num_dense_layers"),
            (_TIED, ("conv_L_cache", 3), ("use_expert_bias", True)),
            (("conv_bias", False),),
            _convolutions,
        ),
        "mamba2": SizedFamily(
            "Mamba2ForCausalLM",
            ("hidden_size", "num_hidden_layers", "vocab_size", "num_heads", "head_dim"),
            (
                ("use_conv_bias", True),
                ("expand", 2),
                ("state_size", 128),
                ("conv_kernel", 4),
                ("n_groups", 8),
            ),
            (("use_bias", False),),
            _all_states,
        ),
        "qwen3_5_text": SizedFamily(
            "Qwen3_5ForCausalLM",
            (*DENSE, *HEADS, *_DELTA[:-1], "head_dim"),
            derive=_every_fourth,
        ),
        "qwen3_5_moe_text": SizedFamily(
            "Qwen3_5MoeForCausalLM",
            (*_DECODER, *HEADS, *_DELTA, "head_dim", "moe_intermediate_size", "num_experts"),
            derive=_every_fourth,
        ),
        "starcoder2": SizedFamily(
            "Starcoder2ForCausalLM",
            (*DENSE, *HEADS),
            (_TIED, ("use_bias", True), ("sliding_window", None)),
        ),
        "youtu": SizedFamily(
            "YoutuForCausalLM",
            (*DENSE, *_LATENT[:4]),
            (_TIED,),
        ),
        "olmo": SizedFamily("OlmoForCausalLM", DENSE),
        "olmo2": SizedFamily("Olmo2ForCausalLM", DENSE),
        "olmo3": SizedFamily(
            "Olmo3ForCausalLM",
            DENSE,
            (("sliding_window", 4096), _EVERY_FOURTH),
            derive=_last_of_pattern,
        ),
        "olmo_hybrid": SizedFamily(
            "OlmoHybridForCausalLM",
            (*DENSE, "linear_conv_kernel_dim"),
            (("linear_conv_kernel_dim", 4),),
            derive=_delta_sizes,
        ),
        "phi3": SizedFamily("Phi3ForCausalLM", DENSE, (("sliding_window", None),)),
        "seed_oss": SizedFamily(
            "SeedOssForCausalLM",
            DENSE,
            (
                ("attention_bias", True),
                ("attention_out_bias", False),
                ("head_dim", 128),
                ("num_key_value_heads", 8),
            ),
        ),
        "deepseek_v2": SizedFamily("DeepseekV2ForCausalLM", (*_DECODER, *_LATENT)),
        "deepseek_v3": SizedFamily("DeepseekV3ForCausalLM", (*_DECODER, *_LATENT)),
        "gpt_oss": SizedFamily(
            "GptOssForCausalLM",
            (*DENSE, *HEADS, "head_dim", "num_local_experts"),
            (("attention_bias", True), ("sliding_window", 128)),
            derive=_alternating,
        ),
        "minicpm3": SizedFamily(
            "MiniCPM3ForCausalLM",
            (*DENSE, *_LATENT[:4]),
            (_TIED,),
            derive=_rotated_heads,
        ),
        "minimax": SizedFamily(
            "MiniMaxForCausalLM",
            (*DENSE, *HEADS, "num_local_experts", "block_size"),
            (
                ("block_size", 256),
                ("sliding_window", None),
                ("linear_attn_alpha_factor", 1),
            ),
            derive=_alternating_states,
        ),
        "mixtral": SizedFamily(
            "MixtralForCausalLM",
            (*DENSE, *HEADS, "num_local_experts"),
            (("sliding_window", None),),
        ),
        "qwen3_moe": SizedFamily(
            "Qwen3MoeForCausalLM",
            (*DENSE, *HEADS, "head_dim", "moe_intermediate_size", "num_experts"),
            plain=(*_SPARSE, ("use_sliding_window", False)),
            derive=_no_window,
        ),
        "qwen3_next": SizedFamily(
            "Qwen3NextForCausalLM",
            (*DENSE, *HEADS, *_DELTA, "head_dim", "moe_intermediate_size", "num_experts"),
            plain=_SPARSE,
            derive=_every_fourth,
        ),
        "zamba2": SizedFamily(
            "Zamba2ForCausalLM",
            (
                *DENSE,
                "n_mamba_heads",
                "mamba_ngroups",
                "num_mem_blocks",
                "adapter_rank",
                "mamba_d_state",
                "mamba_d_conv",
                "mamba_expand",
            ),
            (
                _TIED,
                ("mamba_d_state", 64),
                ("mamba_d_conv", 4),
                ("mamba_expand", 2),
                ("mamba_ngroups", 1),
                ("num_mem_blocks", 1),
                ("adapter_rank", 128),
                ("use_shared_attention_adapter", False),
            ),
            (("head_dim", None), ("add_bias_linear", False), ("use_long_context", False)),
            _shared_attention,
        ),
    }
)
"""Families by model type; ``plain_weights.LAYERS`` has their tensors."""


def complete_fields(raw: Mapping[str, Any]) -> Fields | None:
    """Return a config's fields with those that its file omits; None if they are not known here."""
    family = SIZED.get(str(raw.get("model_type")))
    if family is None or raw.get("architectures") != [family.architecture]:
        return None
    return with_omitted(family, raw)


def with_omitted(family: SizedFamily, raw: Mapping[str, object]) -> Fields | None:
    """Return a family's fields with those that a file omits; None for values not known here."""
    fields: Fields = {**_DEFAULTS, **dict(family.defaults), **dict(family.plain), **raw}
    if "layers_block_type" in raw:
        fields.setdefault("num_hidden_layers", len(fields["layers_block_type"]))
    for name, alias in family.aliases:
        if name in family.needed and name not in raw and alias in raw:
            fields[name] = raw[alias]
    if any(fields[name] != value for name, value in family.plain):
        return None
    if any(type(fields.get(name)) is not int or fields[name] < 0 for name in family.needed):
        return None
    if "kv_lora_rank" in family.needed and "q_lora_rank" not in fields:
        return None
    heads = fields.get("num_attention_heads")
    if heads and not fields.get("head_dim"):
        fields["head_dim"] = fields["hidden_size"] // heads
    if heads and fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    family.derive(fields)
    types = fields.get("layer_types")
    if isinstance(types, list):
        types = fields["layer_types"] = [OLDER_TYPES.get(kind, kind) for kind in types]
    if types is not None and len(types) != fields["num_hidden_layers"]:
        return None
    return fields
