"""Tensors of common families' weights, computed from their configs without torch.

Names are those of transformers' modules, where experts of a layer are one tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from kvell.models.config.config_fields import head_size
from kvell.models.families.families import FUSED, FusedFamily
from kvell.models.families.tensor_shapes import Shapes, linear_shapes, mlp_shapes, numbered_shapes
from kvell.models.families.vision_weights import BESIDE_TEXT

Part = Callable[[SimpleNamespace, int], Shapes]
"""Returns tensors of a layer, by the layer's index."""


def plain_tensors(config: SimpleNamespace) -> Shapes | None:
    """Return the shapes of all parameters of a model with a plain config, tied ones once.

    None stands for another family.

    :param config: a config of :func:`kvell.models.families.plain_config.sizes_config`.
    """
    rest = BESIDE_TEXT.get(config.model_type)
    if rest is None:
        body = "model"
        text = config
    else:
        body = "model.language_model"
        text = config.text_config
    family = next((f for f in FUSED.values() if f.model_type == text.model_type), None)
    parts = LAYERS.get(text.model_type)
    if parts is None:
        if family is None or family.mixer:
            return None
        parts = (lambda config, _index: dense_layer(config, family),)
    else:
        parts = (*parts, _norms)
    tensors = _outer_tensors(text, body)
    for index in range(text.num_hidden_layers):
        for part in parts:
            own = part(text, index)
            tensors |= {f"{body}.layers.{index}.{name}": shape for name, shape in own.items()}
    return tensors if rest is None else tensors | rest(config)


def _outer_tensors(config: SimpleNamespace, body: str) -> Shapes:
    hidden, vocab = config.hidden_size, config.vocab_size
    rows = vocab + MORE_ROWS.get(config.model_type, 0)
    tensors: Shapes = {f"{body}.embed_tokens.weight": (rows, hidden)}
    if NORMS.get(config.model_type, TWO):
        tensors[f"{body}.norm.weight"] = (hidden,)
    if config.model_type == "gemma3n_text":
        tensors |= _outer_gemma3n(config)
    if config.model_type == "starcoder2":
        tensors[f"{body}.norm.bias"] = (hidden,)
    ties = config.tie_word_embeddings and config.model_type not in NEVER_TIED
    if not ties and not str(config.architectures[0]).endswith("Model"):
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def dense_layer(config: Any, family: FusedFamily) -> Shapes:
    """Return the tensors of a layer of a family with a compiled pass and without a mixer."""
    has_bias = bool(family.attention_bias and getattr(config, family.attention_bias))
    mlp_bias = bool(family.mlp_bias and getattr(config, family.mlp_bias))
    hidden = config.hidden_size
    norms = ["input_layernorm", family.before_mlp]
    if family.sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {
        **_attention(config, 0, has_bias or family.biased_inputs, has_bias, family.head_norms),
        **mlp_shapes(family.mlp, hidden, config.intermediate_size, mlp_bias),
        **{f"{name}.weight": (hidden,) for name in norms},
    }


def _attention(
    config: Any,
    _index: int = 0,
    biased_inputs: bool = False,
    biased_output: bool = False,
    head_norms: bool = False,
    query_parts: int = 1,
) -> Shapes:
    """Return the tensors of attention.

    :param query_parts: 2 if queries have gates of their size.
    """
    size = head_size(config, config.model_type)
    hidden = config.hidden_size
    queries, keys = (size * n for n in (config.num_attention_heads, config.num_key_value_heads))
    tensors: Shapes = {}
    for name, out in (("q", queries * query_parts), ("k", keys), ("v", keys)):
        tensors |= linear_shapes(f"self_attn.{name}_proj", out, hidden, biased_inputs)
    tensors |= linear_shapes("self_attn.o_proj", hidden, queries, biased_output)
    if head_norms:
        tensors |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return tensors


def _experts(hidden: int, inner: int, count: int) -> Shapes:
    """Return the tensors of experts and their router, of which each token takes a few."""
    return {
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.gate.weight": (count, hidden),
    }


def _norms(config: SimpleNamespace, _index: int) -> Shapes:
    names = NORMS.get(config.model_type, TWO)
    return {f"{name}_layernorm.weight": (config.hidden_size,) for name in names}


def _attention_with_bias(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.attention_bias)
    return _attention(config, 0, bias, bias)


def _mlp(config: SimpleNamespace, _index: int) -> Shapes:
    return mlp_shapes("mlp", config.hidden_size, config.intermediate_size)


def _mlp_with_bias(config: SimpleNamespace, _index: int) -> Shapes:
    return mlp_shapes("mlp", config.hidden_size, config.intermediate_size, bool(config.mlp_bias))


def _local_experts(config: SimpleNamespace, _index: int) -> Shapes:
    return _experts(config.hidden_size, config.intermediate_size, config.num_local_experts)


def _qwen3_moe(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.attention_bias)
    experts = _experts(config.hidden_size, config.moe_intermediate_size, config.num_experts)
    return _attention(config, 0, bias, bias, head_norms=True) | experts


def _gpt_oss(config: SimpleNamespace, _index: int) -> Shapes:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    return {
        "self_attn.sinks": (config.num_attention_heads,),
        **linear_shapes("mlp.router", count, hidden, has_bias=True),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


def _latent(config: SimpleNamespace, _index: int) -> Shapes:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    rope, plain, values = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    queries = heads * (plain + rope)
    bias = bool(config.attention_bias)
    tensors: Shapes = {}
    if config.q_lora_rank:
        tensors |= linear_shapes("self_attn.q_a_proj", config.q_lora_rank, hidden, bias)
        tensors |= linear_shapes("self_attn.q_b_proj", queries, config.q_lora_rank)
        tensors["self_attn.q_a_layernorm.weight"] = (config.q_lora_rank,)
    else:
        tensors |= linear_shapes("self_attn.q_proj", queries, hidden)
    tensors |= linear_shapes("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    tensors |= linear_shapes("self_attn.kv_b_proj", heads * (plain + values), latent)
    tensors |= linear_shapes("self_attn.o_proj", hidden, heads * values, bias)
    tensors["self_attn.kv_a_layernorm.weight"] = (latent,)
    return tensors


def _deepseek_mlp(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    if index < config.first_k_dense_replace:
        return _mlp(config, index)
    inner, count = config.moe_intermediate_size, config.n_routed_experts
    shared = mlp_shapes("mlp.shared_experts", hidden, inner * (config.n_shared_experts or 0))
    bias: Shapes = {"mlp.gate.e_score_correction_bias": (count,)}
    return {
        **_experts(hidden, inner, count),
        **shared,
        **(bias if config.model_type != "deepseek_v2" else {}),
    }


def _gated_experts(config: SimpleNamespace, _index: int) -> Shapes:
    hidden = config.hidden_size
    return {
        **_experts(hidden, config.moe_intermediate_size, config.num_experts),
        **mlp_shapes("mlp.shared_expert", hidden, config.shared_expert_intermediate_size),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }


def _gated_mixer(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    if config.layer_types[index] == "full_attention":
        bias = bool(config.attention_bias)
        return _attention(config, 0, bias, bias, head_norms=True, query_parts=2)
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * size
    return {
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config.linear_conv_kernel_dim),
        "linear_attn.in_proj_qkvz.weight": (2 * keys + 2 * values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * heads, hidden),
        "linear_attn.norm.weight": (size,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mlp_without_gate(config: SimpleNamespace, index: int) -> Shapes:
    shapes = _mlp_with_bias(config, index)
    return {name: shape for name, shape in shapes.items() if "gate_proj" not in name}


def _seed_oss(config: SimpleNamespace, _index: int) -> Shapes:
    return _attention(config, 0, bool(config.attention_bias), bool(config.attention_out_bias))


def _attention_with_wide_norms(config: SimpleNamespace, index: int) -> Shapes:
    sizes = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (config.head_dim * heads for heads in sizes)
    norms = {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    return _attention_with_bias(config, index) | norms


def _mamba1(name: str, hidden: int, inner: int, state: int, rank: int, kernel: int) -> Shapes:
    return {
        f"{name}.A_log": (inner, state),
        f"{name}.D": (inner,),
        f"{name}.conv1d.weight": (inner, 1, kernel),
        **linear_shapes(f"{name}.in_proj", 2 * inner, hidden),
        **linear_shapes(f"{name}.x_proj", rank + 2 * state, inner),
        **linear_shapes(f"{name}.dt_proj", inner, rank, has_bias=True),
        **linear_shapes(f"{name}.out_proj", hidden, inner),
    }


def _mamba2(
    config: SimpleNamespace, name: str, sizes: Sequence[str], has_bias: bool, has_norm: bool = True
) -> Shapes:
    """Return the tensors of a Mamba 2 mixer.

    :param sizes: the fields of heads, a head's size, groups, state and the convolution's kernel.
    """
    heads, size, groups, state, kernel = (getattr(config, field) for field in sizes)
    hidden = config.hidden_size
    inner = heads * size
    convolved = inner + 2 * groups * state
    mixer: Shapes = {
        **dict.fromkeys((f"{name}.dt_bias", f"{name}.A_log", f"{name}.D"), (heads,)),
        f"{name}.conv1d.weight": (convolved, 1, kernel),
        **linear_shapes(f"{name}.in_proj", inner + convolved + heads, hidden),
        **({f"{name}.norm.weight": (inner,)} if has_norm else {}),
        **linear_shapes(f"{name}.out_proj", hidden, inner),
    }
    return _conv_bias(mixer, name, has_bias)


def _conv_bias(tensors: Shapes, name: str, has_bias: bool) -> Shapes:
    channels = tensors[f"{name}.conv1d.weight"][0]
    return tensors | ({f"{name}.conv1d.bias": (channels,)} if has_bias else {})


def _jamba(config: SimpleNamespace, index: int) -> Shapes:
    hidden, state = config.hidden_size, config.mamba_d_state
    if index % config.expert_layer_period == config.expert_layer_offset:
        tensors = _experts(hidden, config.intermediate_size, config.num_experts)
    else:
        tensors = mlp_shapes("feed_forward", hidden, config.intermediate_size)
    if config.layer_types[index] == "full_attention":
        return tensors | _attention(config)
    rank = config.mamba_dt_rank
    inner = config.mamba_expand * hidden
    mixer = _mamba1("mamba", hidden, inner, state, rank, config.mamba_d_conv)
    norms = {"dt": rank, "b": state, "c": state}
    tensors |= {f"mamba.{name}_layernorm.weight": (size,) for name, size in norms.items()}
    return tensors | _conv_bias(mixer, "mamba", config.mamba_conv_bias)


def _lfm2_mlp(config: SimpleNamespace, _index: int) -> Shapes:
    inner = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        step = config.block_multiple_of
        inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
        inner = step * -(-inner // step)
    return mlp_shapes("feed_forward", config.hidden_size, inner)


def _lfm2_mixer(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    if config.layer_types[index] == "full_attention":
        return _attention(config, head_norms=True)
    return {
        "conv.conv.weight": (hidden, 1, config.conv_L_cache),
        **linear_shapes("conv.in_proj", 3 * hidden, hidden),
        **linear_shapes("conv.out_proj", hidden, hidden),
    }


def _bamba_states(config: SimpleNamespace, has_norm: bool) -> Shapes:
    return _mamba2(config, "mamba", _BAMBA, config.mamba_conv_bias, has_norm)


def _bamba_mixer(config: SimpleNamespace, index: int) -> Shapes:
    if config.layer_types[index] == "full_attention":
        return _attention_with_bias(config, index)
    return _bamba_states(config, has_norm=True)


def _falcon_h1(config: SimpleNamespace, index: int) -> Shapes:
    return _attention_with_bias(config, index) | _bamba_states(config, has_norm=False)


def _nemotron_h(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    match config.layer_types[index]:
        case "full_attention":
            return _attention_with_bias(config, index)
        case "mlp":
            bias = bool(config.mlp_bias)
            inner = config.intermediate_size
            up = linear_shapes("mixer.up_proj", inner, hidden, bias)
            return up | linear_shapes("mixer.down_proj", hidden, inner, bias)
    return _mamba2(config, "mixer", _NEMOTRON, config.use_conv_bias)


def _mamba(config: SimpleNamespace, _index: int) -> Shapes:
    sizes = (config.intermediate_size, config.state_size, config.time_step_rank)
    mixer = _mamba1("mixer", config.hidden_size, *sizes, config.conv_kernel)
    return _conv_bias(mixer, "mixer", config.use_conv_bias)


def _starcoder2(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.use_bias)
    hidden, inner = config.hidden_size, config.intermediate_size
    norms = ("input_layernorm.bias", "post_attention_layernorm.bias")
    return {
        **_attention(config, 0, bias, bias),
        **linear_shapes("mlp.c_fc", inner, hidden, bias),
        **linear_shapes("mlp.c_proj", hidden, inner, bias),
        **dict.fromkeys(norms, (hidden,)),
    }


def _llama4_mlp(config: SimpleNamespace, index: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    if index not in config.moe_layers:
        return mlp_shapes("feed_forward", hidden, config.intermediate_size_mlp)
    shared = mlp_shapes("feed_forward.shared_expert", hidden, inner)
    return _local_experts(config, index) | shared


def _lfm2_experts(config: SimpleNamespace, index: int) -> Shapes:
    hidden, count = config.hidden_size, config.num_experts
    if index < config.num_dense_layers:
        return mlp_shapes("feed_forward", hidden, config.intermediate_size)
    bias: Shapes = {"feed_forward.expert_bias": (count,)} if config.use_expert_bias else {}
    return _experts(hidden, config.moe_intermediate_size, count) | bias


def _mamba2_alone(config: SimpleNamespace, _index: int) -> Shapes:
    return _mamba2(config, "mixer", _MAMBA2, config.use_conv_bias)


def _mllama(config: SimpleNamespace, index: int) -> Shapes:
    if index not in config.cross_attention_layers:
        return _attention(config)
    crossed = _attention(config, head_norms=True).items()
    return {
        **{name.replace("self_attn", "cross_attn"): shape for name, shape in crossed},
        "cross_attn_attn_gate": (1,),
        "cross_attn_mlp_gate": (1,),
    }


def _zamba2(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of Mamba 2, and where it is hybrid its part of the shared attention.

    The first ``num_mem_blocks`` hybrid layers have an attention that later ones share; each has
    adapters of its own.
    """
    mixer = _mamba2(config, "mamba", _ZAMBA2, has_bias=True)
    if config.layer_types[index] != "hybrid":
        return mixer
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.adapter_rank
    wide = 2 * hidden
    place = config.layer_types[:index].count("hybrid")
    lists = {"feed_forward.gate_up_proj_adapter": (hidden, 2 * inner)}
    if config.use_shared_attention_adapter:
        for name in ("q", "k", "v"):
            lists[f"self_attn.linear_{name}_adapter"] = (wide, wide)
    shared: Shapes = {}
    for name, (width, out) in lists.items():
        shared |= linear_shapes(f"{name}_list.{place}.0", rank, width)
        shared |= linear_shapes(f"{name}_list.{place}.1", out, rank)
    if place < config.num_mem_blocks:
        shared |= _shared_transformer(config, wide)
    return {
        **{f"mamba_decoder.{name}": shape for name, shape in mixer.items()},
        **{f"shared_transformer.{name}": shape for name, shape in shared.items()},
        **linear_shapes("linear", hidden, hidden),
    }


def _shared_transformer(config: SimpleNamespace, wide: int) -> Shapes:
    """Return an attention over a token's embedding next to its hidden state, and its MLP."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (
        config.head_dim * heads
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    return {
        **linear_shapes("self_attn.q_proj", queries, wide),
        **linear_shapes("self_attn.k_proj", keys, wide),
        **linear_shapes("self_attn.v_proj", keys, wide),
        **linear_shapes("self_attn.o_proj", hidden, queries),
        **linear_shapes("feed_forward.gate_up_proj", 2 * inner, hidden),
        **linear_shapes("feed_forward.down_proj", hidden, inner),
        "input_layernorm.weight": (wide,),
        "pre_ff_layernorm.weight": (hidden,),
    }


def _gemma3n(config: SimpleNamespace, index: int) -> Shapes:
    hidden, own, rank = config.hidden_size, config.hidden_size_per_layer_input, config.laurel_rank
    inner, copies = config.intermediate_size, config.altup_num_inputs
    attention = _attention(config, head_norms=True)
    if index >= config.num_hidden_layers - config.num_kv_shared_layers > 0:
        shared = ("self_attn.k_", "self_attn.v_")
        attention = {n: shape for n, shape in attention.items() if not n.startswith(shared)}
    return {
        **attention,
        **mlp_shapes("mlp", hidden, inner[index] if isinstance(inner, list) else inner),
        **linear_shapes("altup.correction_coefs", copies, copies),
        **linear_shapes("altup.prediction_coefs", copies**2, copies),
        **linear_shapes("altup.modality_router", copies, hidden),
        "altup.router_norm.weight": (hidden,),
        "altup.correct_output_scale": (hidden,),
        **linear_shapes("laurel.linear_left", rank, hidden),
        **linear_shapes("laurel.linear_right", hidden, rank),
        "laurel.post_laurel_norm.weight": (hidden,),
        **linear_shapes("per_layer_input_gate", own, hidden),
        **linear_shapes("per_layer_projection", hidden, own),
        "post_per_layer_input_norm.weight": (hidden,),
    }


def _outer_gemma3n(config: SimpleNamespace) -> Shapes:
    """Return the embeddings of each layer, and the projections to and from a token's copies."""
    hidden, own = config.hidden_size, config.hidden_size_per_layer_input
    layers = config.num_hidden_layers * own
    projection: Shapes = {"weight": (hidden, hidden)}
    tensors: Shapes = {
        "embed_tokens_per_layer.weight": (config.vocab_size_per_layer_input, layers),
        "per_layer_projection_norm.weight": (own,),
        **linear_shapes("per_layer_model_projection", layers, hidden),
    }
    for name in ("altup_projections", "altup_unembed_projections"):
        tensors |= numbered_shapes(name, config.altup_num_inputs - 1, projection)
    return {f"model.{name}": shape for name, shape in tensors.items()}


def _kimi_mixer(config: SimpleNamespace, index: int) -> Shapes:
    if config.layer_types[index] == "full_attention":
        return _latent(config, index)
    hidden, heads, size = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    width = heads * size
    tensors: Shapes = {
        "self_attn.conv1d.weight": (3 * width, 1, config.linear_conv_kernel_dim),
        "self_attn.forget_gate.A_log": (1, 1, heads, 1),
        "self_attn.forget_gate.dt_bias": (width,),
        "self_attn.o_norm.weight": (size,),
        **linear_shapes("self_attn.b_proj", heads, hidden),
        **linear_shapes("self_attn.o_proj", hidden, width),
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors |= linear_shapes(f"self_attn.{name}", width, hidden)
    for name in ("forget_gate.f", "g"):
        tensors |= linear_shapes(f"self_attn.{name}_a_proj", size, hidden)
        tensors |= linear_shapes(f"self_attn.{name}_b_proj", width, size)
    return tensors


def _kimi_mlp(config: SimpleNamespace, index: int) -> Shapes:
    if config.mlp_layer_types[index] != "sparse":
        return _mlp(config, index)
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    return {
        **_experts(hidden, inner, count),
        **mlp_shapes("mlp.shared_experts", hidden, inner * config.n_shared_experts),
        "mlp.gate.e_score_correction_bias": (count,),
    }


def _minimax(config: SimpleNamespace, index: int) -> Shapes:
    if config.layer_types[index] == "full_attention":
        return _attention(config)
    hidden, heads, block = config.hidden_size, config.num_attention_heads, config.block_size
    width = heads * config.head_dim
    return {
        **linear_shapes("self_attn.qkv_proj", 3 * width, hidden),
        **linear_shapes("self_attn.output_gate", width, hidden),
        **linear_shapes("self_attn.out_proj", hidden, width),
        "self_attn.norm.weight": (width,),
        "self_attn.slope_rate": (heads, 1, 1),
        "self_attn.query_decay": (heads, block, 1),
        "self_attn.key_decay": (heads, block, 1),
        "self_attn.diagonal_decay": (1, heads, block, block),
    }


def _olmo_hybrid(config: SimpleNamespace, index: int) -> Shapes:
    if config.layer_types[index] == "full_attention":
        return _attention_with_wide_norms(config, index)
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    size = config.linear_value_head_dim
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * size
    widths = {"q": keys, "k": keys, "v": values, "g": values, "a": heads, "b": heads}
    tensors: Shapes = {}
    for name, width in widths.items():
        tensors |= linear_shapes(f"linear_attn.{name}_proj", width, hidden)
    return {
        **tensors,
        **linear_shapes("linear_attn.o_proj", hidden, values),
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config.linear_conv_kernel_dim),
        "linear_attn.o_norm.weight": (size,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
    }


def _granite_mlp(config: SimpleNamespace, index: int) -> Shapes:
    hidden, shared = config.hidden_size, config.shared_intermediate_size
    return {
        **linear_shapes("shared_mlp.input_linear", 2 * shared, hidden),
        **linear_shapes("shared_mlp.output_linear", hidden, shared),
        **(_local_experts(config, index) if config.num_local_experts else {}),
    }


_BAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA2 = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
_NEMOTRON = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_ZAMBA2 = ("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv")

LAYERS: Mapping[str, tuple[Part, ...]] = MappingProxyType(
    {
        "arcee": (_attention_with_bias, _mlp_without_gate),
        "bamba": (_bamba_mixer, _mlp_with_bias),
        "deepseek_v2": (_latent, _deepseek_mlp),
        "deepseek_v3": (_latent, _deepseek_mlp),
        "exaone4": (partial(_attention, head_norms=True), _mlp),
        "falcon_h1": (_falcon_h1, _mlp_with_bias),
        "falcon_mamba": (_mamba,),
        "glm4_moe_lite": (_latent, _deepseek_mlp),
        "gemma3n_text": (_gemma3n,),
        "gpt_oss": (_attention_with_bias, _gpt_oss),
        "granite": (_attention_with_bias, _mlp_with_bias),
        "granitemoehybrid": (_bamba_mixer, _granite_mlp),
        "jamba": (_jamba,),
        "kimi_linear": (_kimi_mixer, _kimi_mlp),
        "lfm2": (_lfm2_mixer, _lfm2_mlp),
        "lfm2_moe": (_lfm2_mixer, _lfm2_experts),
        "llama4_text": (_attention_with_bias, _llama4_mlp),
        "mamba": (_mamba,),
        "mamba2": (_mamba2_alone,),
        "minicpm3": (_latent, _mlp_with_bias),
        "minimax": (_minimax, _local_experts),
        "mixtral": (_attention, _local_experts),
        "mllama_text_model": (_mllama, _mlp),
        "nemotron_h": (_nemotron_h,),
        "olmo": (_attention_with_bias, _mlp),
        "olmo2": (_attention_with_wide_norms, _mlp),
        "olmo3": (_attention_with_wide_norms, _mlp),
        "olmo_hybrid": (_olmo_hybrid, _mlp),
        "phi3": (_attention_with_bias, _mlp),
        "qwen2_5_vl_text": (partial(_attention, biased_inputs=True), _mlp),
        "qwen2_vl_text": (partial(_attention, biased_inputs=True), _mlp),
        "qwen3_5_moe_text": (_gated_mixer, _gated_experts),
        "qwen3_5_text": (_gated_mixer, _mlp),
        "qwen3_moe": (_qwen3_moe,),
        "qwen3_next": (_gated_mixer, _gated_experts),
        "seed_oss": (_seed_oss, _mlp_with_bias),
        "starcoder2": (_starcoder2,),
        "youtu": (_latent, _mlp),
        "zamba2": (_zamba2,),
    }
)
"""Parts of a layer besides its norms, by model type: families without a compiled pass."""
TWO = ("input", "post_attention")
NEVER_TIED = frozenset({"kimi_linear", "mllama_text_model", "nemotron_h"})
"""Model types whose head transformers never ties, whatever their configs say."""
MORE_ROWS: Mapping[str, int] = MappingProxyType({"mllama_text_model": 8})
"""Rows of embeddings after those of the vocabulary, by model type."""
FLOAT32: Mapping[str, str] = MappingProxyType(
    {
        "glm4_moe_lite": "e_score_correction_bias",
        "lfm2_moe": "expert_bias",
        "olmo_hybrid": "A_log",
    }
)
"""Ends of names of tensors that stay in float32, by model type."""
NORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "nemotron_h", "zamba2"), ("input",)),
        "gemma3n_text": (*TWO, "pre_feedforward", "post_feedforward"),
        "olmo": (),
    }
)
"""Norms of a layer, where they are not two; without any, their functions have no weights."""
