"""Families with experts whose sizes are read from a config without transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


def _by_period(fields: Fields) -> None:
    period, offset = fields["attn_layer_period"], fields["attn_layer_offset"]
    fields["layer_types"] = [
        "full_attention" if index % period == offset else "linear_attention"
        for index in range(fields["num_hidden_layers"])
    ]
    if fields["mamba_dt_rank"] == "auto":
        fields["mamba_dt_rank"] = -(-fields["hidden_size"] // 16)


def _by_index(fields: Fields) -> None:
    chosen = fields.get("attn_layer_indices") or ()
    fields["layer_types"] = [
        "full_attention" if index in chosen else "linear_attention"
        for index in range(fields["num_hidden_layers"])
    ]
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
    if fields.get("layer_types") is None:
        fields["layer_types"] = [
            "chunked_attention" if rotated else "full_attention" for rotated in rotates
        ]


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
    count = fields["num_hidden_layers"]
    if fields.get("layer_types") is None:
        chosen = range(count) if chosen is None else chosen
        fields["layer_types"] = [
            "full_attention" if index in chosen else "conv" for index in range(count)
        ]
    fields["intermediate_size"] = fields.get("block_ff_dim") or fields["intermediate_size"]
    fields["tie_word_embeddings"] = fields.get("tie_embedding", fields["tie_word_embeddings"])


def _last_of_pattern(fields: Fields) -> None:
    """Make every n-th layer full, by a pattern's length; all, without a window."""
    count, length = fields["num_hidden_layers"], fields["sliding_window_pattern"]
    if isinstance(length, str):
        length = len(length)
    if fields.get("layer_types") is None:
        windowed = bool(fields.get("sliding_window") and length)
        fields["layer_types"] = [
            "sliding_attention" if windowed and (index + 1) % length else "full_attention"
            for index in range(count)
        ]


def _unchanged(_fields: Fields) -> None:
    """Derive no field."""


def _alternating(fields: Fields) -> None:
    count = fields["num_hidden_layers"]
    kinds = ("sliding_attention", "full_attention")
    if fields.get("layer_types") is None:
        fields["layer_types"] = [kinds[index % 2] for index in range(count)]


def _every_fourth(fields: Fields) -> None:
    count = fields["num_hidden_layers"]
    interval = fields.get("full_attention_interval") or 4
    if fields.get("layer_types") is None:
        fields["layer_types"] = [
            "full_attention" if (index + 1) % interval == 0 else "linear_attention"
            for index in range(count)
        ]


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
    if fields.get("layer_types") is None:
        fields["layer_types"] = [
            "sliding_attention" if (index + 1) % 5 else "full_attention" for index in range(count)
        ]
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
    if fields.get("layer_types") is None:
        full = own.get("full_attn_layers")
        chosen = range(4, count, 4) if full is None else [index - 1 for index in full]
        fields["layer_types"] = [
            "full_attention" if index in chosen else "linear_attention" for index in range(count)
        ]
    if fields.get("mlp_layer_types") is None:
        first = fields.get("first_k_dense_replace", 1)
        fields["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (count - first)


def _alternating_states(fields: Fields) -> None:
    count = fields["num_hidden_layers"]
    if fields.get("layer_types") is None:
        fields["layer_types"] = [
            "full_attention" if (index + 1) % 2 else "linear_attention" for index in range(count)
        ]


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

    :param architecture: the class that transformers runs.
    :param needed: sizes that the file must give, as integers above 0 (or 0 where that is a number
        of layers).
    :param defaults: transformers' defaults of the other fields that sizes depend on.
    :param plain: fields with the one value for which the sizes are known here.
    :param derive: sets fields that follow from others.
    :param aliases: sizes with the other name that some files have.
    """

    architecture: str
    needed: tuple[str, ...]
    defaults: tuple[tuple[str, object], ...]
    plain: tuple[tuple[str, object], ...] = ()
    derive: Callable[[Fields], None] = _unchanged
    aliases: tuple[tuple[str, str], ...] = (("num_experts", "num_local_experts"),)


OLDER_TYPES: Mapping[str, str] = MappingProxyType(
    {"attention": "full_attention", "mamba": "linear_attention"}
)
"""Layers' types in older files, with the names that transformers gives them."""
_PLAIN = (("tie_word_embeddings", False), ("attention_bias", False))
_SPARSE: tuple[tuple[str, object], ...] = (("decoder_sparse_step", 1), ("mlp_only_layers", []))
_HEADS = ("num_key_value_heads",)
_DENSE = (*_DECODER, "intermediate_size")
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
_MLP = ("mlp_bias", False)
_EVERY_FOURTH = ("sliding_window_pattern", 4)
_STATE_DEFAULTS = (("state_size", 16), ("expand", 2), ("conv_kernel", 4), ("use_bias", False))

SIZED: Mapping[str, SizedFamily] = MappingProxyType(
    {
        "arcee": SizedFamily("ArceeForCausalLM", _DENSE, (*_PLAIN, _MLP)),
        "bamba": SizedFamily(
            "BambaForCausalLM",
            (*_DENSE, *_HEADS, "mamba_n_heads"),
            (*_PLAIN, _MLP, *_MAMBA2),
            derive=_by_index,
        ),
        "exaone4": SizedFamily(
            "Exaone4ForCausalLM",
            (*_DENSE, *_HEADS),
            (*_PLAIN, ("sliding_window", 4096), _EVERY_FOURTH),
            derive=_last_of_pattern,
        ),
        "falcon_h1": SizedFamily(
            "FalconH1ForCausalLM",
            (*_DENSE, "mamba_n_heads"),
            (*_PLAIN, _MLP, *_MAMBA2, ("mamba_d_ssm", 1024), ("num_key_value_heads", 8)),
            (("mamba_rms_norm", False), ("projectors_bias", False)),
            _side_by_side,
        ),
        "falcon_mamba": SizedFamily(
            "FalconMambaForCausalLM",
            ("hidden_size", "num_hidden_layers", "vocab_size"),
            (("tie_word_embeddings", True), ("use_conv_bias", True), *_STATE_DEFAULTS),
            derive=_states_alone,
        ),
        "granite": SizedFamily("GraniteForCausalLM", _DENSE, (*_PLAIN, _MLP)),
        "granitemoehybrid": SizedFamily(
            "GraniteMoeHybridForCausalLM",
            (
                *_DENSE,
                "num_local_experts",
                "shared_intermediate_size",
                "mamba_n_heads",
                "mamba_expand",
                "mamba_n_groups",
                "mamba_d_state",
                "mamba_d_conv",
            ),
            (*_PLAIN, *_MAMBA2[:-1], ("num_local_experts", 8), ("mamba_n_heads", 128)),
            (_MAMBA2[-1],),
            _named_layers,
        ),
        "jamba": SizedFamily(
            "JambaForCausalLM",
            (*_DENSE, *_HEADS, "num_experts"),
            (
                *_PLAIN,
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
            (
                *_DENSE,
                *_LATENT[:4],
                "moe_intermediate_size",
                "num_experts",
                "n_shared_experts",
            ),
            (
                *_PLAIN,
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
            (*_DENSE, *_HEADS),
            (
                ("tie_word_embeddings", True),
                ("conv_L_cache", 3),
                ("block_multiple_of", 256),
                ("block_ffn_dim_multiplier", 1.0),
                ("block_auto_adjust_ff_dim", True),
            ),
            (("conv_bias", False),),
            _convolutions,
        ),
        "mamba": SizedFamily(
            "MambaForCausalLM",
            ("hidden_size", "num_hidden_layers", "vocab_size"),
            (("tie_word_embeddings", True), ("use_conv_bias", True), *_STATE_DEFAULTS),
            derive=_states_alone,
        ),
        "nemotron_h": SizedFamily(
            "NemotronHForCausalLM",
            (
                *_DENSE,
                *_HEADS,
                "head_dim",
                "mamba_num_heads",
                "mamba_head_dim",
                "ssm_state_size",
            ),
            (
                *_PLAIN,
                _MLP,
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
                *_HEADS,
                "head_dim",
                "hidden_size_per_layer_input",
                "laurel_rank",
                "vocab_size_per_layer_input",
                "altup_num_inputs",
                "num_kv_shared_layers",
            ),
            (
                ("tie_word_embeddings", True),
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
            _PLAIN,
            derive=_dense_first,
        ),
        "llama4_text": SizedFamily(
            "Llama4ForCausalLM",
            (*_DENSE, *_HEADS, "head_dim", "num_local_experts", "intermediate_size_mlp"),
            (
                *_PLAIN,
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
            (*_DENSE, *_HEADS, "moe_intermediate_size", "num_experts", "num_dense_layers"),
            (("tie_word_embeddings", True), ("conv_L_cache", 3), ("use_expert_bias", True)),
            (("conv_bias", False),),
            _convolutions,
        ),
        "mamba2": SizedFamily(
            "Mamba2ForCausalLM",
            ("hidden_size", "num_hidden_layers", "vocab_size", "num_heads", "head_dim"),
            (
                ("tie_word_embeddings", False),
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
            (*_DENSE, *_HEADS, *_DELTA[:-1], "head_dim"),
            _PLAIN,
            derive=_every_fourth,
        ),
        "qwen3_5_moe_text": SizedFamily(
            "Qwen3_5MoeForCausalLM",
            (
                *_DECODER,
                *_HEADS,
                *_DELTA,
                "head_dim",
                "moe_intermediate_size",
                "num_experts",
            ),
            _PLAIN,
            derive=_every_fourth,
        ),
        "starcoder2": SizedFamily(
            "Starcoder2ForCausalLM",
            (*_DENSE, *_HEADS),
            (("tie_word_embeddings", True), ("use_bias", True), ("sliding_window", None)),
        ),
        "youtu": SizedFamily(
            "YoutuForCausalLM",
            (*_DENSE, *_LATENT[:4]),
            (("tie_word_embeddings", True), ("attention_bias", False)),
        ),
        "olmo": SizedFamily("OlmoForCausalLM", _DENSE, _PLAIN),
        "olmo2": SizedFamily("Olmo2ForCausalLM", _DENSE, _PLAIN),
        "olmo3": SizedFamily(
            "Olmo3ForCausalLM",
            _DENSE,
            (*_PLAIN, ("sliding_window", 4096), _EVERY_FOURTH),
            derive=_last_of_pattern,
        ),
        "olmo_hybrid": SizedFamily(
            "OlmoHybridForCausalLM",
            (*_DENSE, "linear_conv_kernel_dim"),
            (*_PLAIN, ("linear_conv_kernel_dim", 4)),
            derive=_delta_sizes,
        ),
        "phi3": SizedFamily("Phi3ForCausalLM", _DENSE, (*_PLAIN, ("sliding_window", None))),
        "seed_oss": SizedFamily(
            "SeedOssForCausalLM",
            _DENSE,
            (
                ("tie_word_embeddings", False),
                ("attention_bias", True),
                _MLP,
                ("attention_out_bias", False),
                ("head_dim", 128),
                ("num_key_value_heads", 8),
            ),
        ),
        "deepseek_v2": SizedFamily("DeepseekV2ForCausalLM", (*_DECODER, *_LATENT), _PLAIN),
        "deepseek_v3": SizedFamily("DeepseekV3ForCausalLM", (*_DECODER, *_LATENT), _PLAIN),
        "gpt_oss": SizedFamily(
            "GptOssForCausalLM",
            (*_DECODER, *_HEADS, "head_dim", "intermediate_size", "num_local_experts"),
            (("tie_word_embeddings", False), ("attention_bias", True), ("sliding_window", 128)),
            derive=_alternating,
        ),
        "minicpm3": SizedFamily(
            "MiniCPM3ForCausalLM",
            (*_DENSE, *_LATENT[:4]),
            (("tie_word_embeddings", True), ("attention_bias", False), _MLP),
            derive=_rotated_heads,
        ),
        "minimax": SizedFamily(
            "MiniMaxForCausalLM",
            (*_DENSE, *_HEADS, "num_local_experts", "block_size"),
            (
                ("tie_word_embeddings", False),
                ("block_size", 256),
                ("sliding_window", None),
                ("linear_attn_alpha_factor", 1),
            ),
            derive=_alternating_states,
        ),
        "mixtral": SizedFamily(
            "MixtralForCausalLM",
            (*_DECODER, *_HEADS, "intermediate_size", "num_local_experts"),
            (*_PLAIN, ("sliding_window", None)),
        ),
        "qwen3_moe": SizedFamily(
            "Qwen3MoeForCausalLM",
            (
                *_DECODER,
                *_HEADS,
                "head_dim",
                "intermediate_size",
                "moe_intermediate_size",
                "num_experts",
            ),
            _PLAIN,
            (*_SPARSE, ("use_sliding_window", False)),
            _no_window,
        ),
        "qwen3_next": SizedFamily(
            "Qwen3NextForCausalLM",
            (
                *_DECODER,
                *_HEADS,
                *_DELTA,
                "head_dim",
                "intermediate_size",
                "moe_intermediate_size",
                "num_experts",
            ),
            _PLAIN,
            _SPARSE,
            _every_fourth,
        ),
        "zamba2": SizedFamily(
            "Zamba2ForCausalLM",
            (
                *_DENSE,
                "n_mamba_heads",
                "mamba_ngroups",
                "num_mem_blocks",
                "adapter_rank",
                "mamba_d_state",
                "mamba_d_conv",
                "mamba_expand",
            ),
            (
                ("tie_word_embeddings", True),
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
    fields: Fields = dict(family.defaults) | dict(family.plain) | dict(raw)
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
