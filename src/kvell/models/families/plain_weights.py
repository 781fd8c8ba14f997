"""Tensors of common families' weights, computed from their configs without torch.

Names are those of transformers' modules, where experts of a layer are one tensor.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace

from kvell.models.families.families import FUSED, FusedFamily
from kvell.models.families.tensor_shapes import Shapes, linear_shapes, mlp_shapes, numbered_shapes
from kvell.models.families.vision_weights import BESIDE_TEXT


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
    layer = LAYERS.get(text.model_type)
    if layer is None and (family is None or family.mixer):
        return None
    tensors = _outer_tensors(text, body)
    for index in range(text.num_hidden_layers):
        if layer is not None:
            norms = _norms(NORMS.get(text.model_type, TWO), text.hidden_size)
            own = layer(text, index) | norms
        else:
            assert family is not None, "a layer is of one of the two kinds"
            own = _dense_layer(text, family)
        tensors |= {f"{body}.layers.{index}.{name}": shape for name, shape in own.items()}
    return tensors if rest is None else tensors | rest(config)


def _outer_tensors(config: SimpleNamespace, body: str) -> Shapes:
    """Return the embedding, the last norm and the head."""
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


def _dense_layer(config: SimpleNamespace, family: FusedFamily) -> Shapes:
    has_bias = bool(family.attention_bias and getattr(config, family.attention_bias))
    attention = _attention(config, has_bias or family.biased_inputs, has_bias, family.head_norms)
    mlp_bias = bool(family.mlp_bias and getattr(config, family.mlp_bias))
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size, mlp_bias)
    norms = ("input", "post_attention", *(("before_mlp", "after_mlp") if family.sandwich else ()))
    return attention | mlp | _norms(norms, config.hidden_size)


def _attention(
    config: SimpleNamespace,
    biased_inputs: bool,
    biased_output: bool,
    head_norms: bool,
    query_parts: int = 1,
) -> Shapes:
    """Return the tensors of attention.

    :param query_parts: 2 if queries have gates of their size.
    """
    size, hidden = config.head_dim, config.hidden_size
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


def _norms(names: tuple[str, ...], hidden: int) -> Shapes:
    return {f"{name}_layernorm.weight": (hidden,) for name in names}


def _mixtral(config: SimpleNamespace, _index: int) -> Shapes:
    experts = _experts(config.hidden_size, config.intermediate_size, config.num_local_experts)
    return _attention(config, False, False, False) | experts


def _qwen3_moe(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.attention_bias)
    experts = _experts(config.hidden_size, config.moe_intermediate_size, config.num_experts)
    return _attention(config, bias, bias, head_norms=True) | experts


def _gpt_oss(config: SimpleNamespace, _index: int) -> Shapes:
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    bias = bool(config.attention_bias)
    return {
        **_attention(config, bias, bias, head_norms=False),
        "self_attn.sinks": (config.num_attention_heads,),
        **linear_shapes("mlp.router", count, hidden, has_bias=True),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


def _latent_attention(config: SimpleNamespace) -> Shapes:
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


def _deepseek(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    tensors = _latent_attention(config)
    if index < config.first_k_dense_replace:
        return tensors | mlp_shapes("mlp", hidden, config.intermediate_size)
    inner = config.moe_intermediate_size
    if config.model_type != "deepseek_v2":
        tensors["mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
    shared = mlp_shapes("mlp.shared_experts", hidden, inner * (config.n_shared_experts or 0))
    return tensors | _experts(hidden, inner, config.n_routed_experts) | shared


def _qwen3_next(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    shared = mlp_shapes("mlp.shared_expert", hidden, config.shared_expert_intermediate_size)
    tensors = _experts(hidden, config.moe_intermediate_size, config.num_experts) | shared
    tensors["mlp.shared_expert_gate.weight"] = (1, hidden)
    return tensors | _gated_mixer(config, index)


def _gated_mixer(config: SimpleNamespace, index: int) -> Shapes:
    """Return gated attention, or the gated delta rule."""
    hidden = config.hidden_size
    if config.layer_types[index] == "full_attention":
        bias = bool(config.attention_bias)
        return _attention(config, bias, bias, head_norms=True, query_parts=2)
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


def _llama(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.attention_bias)
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size, bool(config.mlp_bias))
    return _attention(config, bias, bias, head_norms=False) | mlp


def _arcee(config: SimpleNamespace, index: int) -> Shapes:
    tensors = _llama(config, index)
    return {name: shape for name, shape in tensors.items() if "gate_proj" not in name}


def _seed_oss(config: SimpleNamespace, _index: int) -> Shapes:
    inputs, output = bool(config.attention_bias), bool(config.attention_out_bias)
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size, bool(config.mlp_bias))
    return _attention(config, inputs, output, head_norms=False) | mlp


def _exaone4(config: SimpleNamespace, _index: int) -> Shapes:
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    return _attention(config, False, False, head_norms=True) | mlp


def _olmo(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.attention_bias)
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    return _attention(config, bias, bias, head_norms=False) | mlp


def _olmo2(config: SimpleNamespace, index: int) -> Shapes:
    sizes = (config.num_attention_heads, config.num_key_value_heads)
    queries, keys = (config.head_dim * heads for heads in sizes)
    norms = {"self_attn.q_norm.weight": (queries,), "self_attn.k_norm.weight": (keys,)}
    return _olmo(config, index) | norms


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
    name: str, hidden: int, sizes: tuple[int, int, int, int, int], has_norm: bool
) -> Shapes:
    """Return the tensors of a Mamba 2 mixer.

    :param sizes: heads, a head's size, groups, state and the convolution's kernel.
    """
    heads, size, groups, state, kernel = sizes
    inner = heads * size
    convolved = inner + 2 * groups * state
    return {
        **dict.fromkeys((f"{name}.dt_bias", f"{name}.A_log", f"{name}.D"), (heads,)),
        f"{name}.conv1d.weight": (convolved, 1, kernel),
        **linear_shapes(f"{name}.in_proj", inner + convolved + heads, hidden),
        **({f"{name}.norm.weight": (inner,)} if has_norm else {}),
        **linear_shapes(f"{name}.out_proj", hidden, inner),
    }


def _conv_bias(tensors: Shapes, name: str, has_bias: bool) -> Shapes:
    channels = tensors[f"{name}.conv1d.weight"][0]
    return tensors | ({f"{name}.conv1d.bias": (channels,)} if has_bias else {})


def _jamba(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of attention or Mamba 1, with experts in every n-th."""
    hidden, state = config.hidden_size, config.mamba_d_state
    if index % config.expert_layer_period == config.expert_layer_offset:
        tensors = _experts(hidden, config.intermediate_size, config.num_experts)
    else:
        tensors = mlp_shapes("feed_forward", hidden, config.intermediate_size)
    if config.layer_types[index] == "full_attention":
        return tensors | _attention(config, False, False, head_norms=False)
    rank = config.mamba_dt_rank
    inner = config.mamba_expand * hidden
    mixer = _mamba1("mamba", hidden, inner, state, rank, config.mamba_d_conv)
    norms = {"dt": rank, "b": state, "c": state}
    tensors |= {f"mamba.{name}_layernorm.weight": (size,) for name, size in norms.items()}
    return tensors | _conv_bias(mixer, "mamba", config.mamba_conv_bias)


def _lfm2(config: SimpleNamespace, index: int) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        step = config.block_multiple_of
        inner = int(config.block_ffn_dim_multiplier * int(2 * inner / 3))
        inner = step * -(-inner // step)
    return _lfm2_mixer(config, index) | mlp_shapes("feed_forward", hidden, inner)


def _lfm2_mixer(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    if config.layer_types[index] == "full_attention":
        return _attention(config, False, False, head_norms=True)
    return {
        "conv.conv.weight": (hidden, 1, config.conv_L_cache),
        **linear_shapes("conv.in_proj", 3 * hidden, hidden),
        **linear_shapes("conv.out_proj", hidden, hidden),
    }


def _bamba_mixer(config: SimpleNamespace, has_norm: bool) -> Shapes:
    sizes = (config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups)
    rest = (config.mamba_d_state, config.mamba_d_conv)
    mixer = _mamba2("mamba", config.hidden_size, (*sizes, *rest), has_norm)
    return _conv_bias(mixer, "mamba", config.mamba_conv_bias)


def _bamba(config: SimpleNamespace, index: int) -> Shapes:
    if config.layer_types[index] == "full_attention":
        return _llama(config, index)
    mlp_bias = bool(config.mlp_bias)
    mlp = mlp_shapes("feed_forward", config.hidden_size, config.intermediate_size, mlp_bias)
    return mlp | _bamba_mixer(config, has_norm=True)


def _falcon_h1(config: SimpleNamespace, index: int) -> Shapes:
    return _llama(config, index) | _bamba_mixer(config, has_norm=False)


def _nemotron_h(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of one block: Mamba 2, attention or an MLP without gates."""
    hidden = config.hidden_size
    match config.layer_types[index]:
        case "full_attention":
            bias = bool(config.attention_bias)
            return _attention(config, bias, bias, head_norms=False)
        case "mlp":
            bias = bool(config.mlp_bias)
            inner = config.intermediate_size
            up = linear_shapes("mixer.up_proj", inner, hidden, bias)
            return up | linear_shapes("mixer.down_proj", hidden, inner, bias)
    sizes = (config.mamba_num_heads, config.mamba_head_dim, config.n_groups)
    rest = (config.ssm_state_size, config.conv_kernel)
    mixer = _mamba2("mixer", hidden, (*sizes, *rest), has_norm=True)
    return _conv_bias(mixer, "mixer", config.use_conv_bias)


def _mamba(config: SimpleNamespace, _index: int) -> Shapes:
    sizes = (config.intermediate_size, config.state_size, config.time_step_rank)
    mixer = _mamba1("mixer", config.hidden_size, *sizes, config.conv_kernel)
    return _conv_bias(mixer, "mixer", config.use_conv_bias)


def _youtu(config: SimpleNamespace, _index: int) -> Shapes:
    return _latent_attention(config) | mlp_shapes(
        "mlp", config.hidden_size, config.intermediate_size
    )


def _minicpm3(config: SimpleNamespace, _index: int) -> Shapes:
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size, bool(config.mlp_bias))
    return _latent_attention(config) | mlp


def _starcoder2(config: SimpleNamespace, _index: int) -> Shapes:
    bias = bool(config.use_bias)
    hidden, inner = config.hidden_size, config.intermediate_size
    norms = ("input_layernorm.bias", "post_attention_layernorm.bias")
    return {
        **_attention(config, bias, bias, head_norms=False),
        **linear_shapes("mlp.c_fc", inner, hidden, bias),
        **linear_shapes("mlp.c_proj", hidden, inner, bias),
        **dict.fromkeys(norms, (hidden,)),
    }


def _llama4(config: SimpleNamespace, index: int) -> Shapes:
    bias = bool(config.attention_bias)
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = _attention(config, bias, bias, head_norms=False)
    if index not in config.moe_layers:
        return attention | mlp_shapes("feed_forward", hidden, config.intermediate_size_mlp)
    experts = _experts(hidden, inner, config.num_local_experts)
    return attention | experts | mlp_shapes("feed_forward.shared_expert", hidden, inner)


def _lfm2_moe(config: SimpleNamespace, index: int) -> Shapes:
    hidden = config.hidden_size
    mixer = _lfm2_mixer(config, index)
    if index < config.num_dense_layers:
        return mixer | mlp_shapes("feed_forward", hidden, config.intermediate_size)
    count = config.num_experts
    bias: Shapes = {"feed_forward.expert_bias": (count,)} if config.use_expert_bias else {}
    return mixer | _experts(hidden, config.moe_intermediate_size, count) | bias


def _mamba2_alone(config: SimpleNamespace, _index: int) -> Shapes:
    sizes = (config.num_heads, config.head_dim, config.n_groups, config.state_size)
    mixer = _mamba2("mixer", config.hidden_size, (*sizes, config.conv_kernel), has_norm=True)
    return _conv_bias(mixer, "mixer", config.use_conv_bias)


def _qwen3_5(config: SimpleNamespace, index: int) -> Shapes:
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    return _gated_mixer(config, index) | mlp


def _qwen2_vl(config: SimpleNamespace, _index: int) -> Shapes:
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    return _attention(config, biased_inputs=True, biased_output=False, head_norms=False) | mlp


def _mllama(config: SimpleNamespace, index: int) -> Shapes:
    mlp = mlp_shapes("mlp", config.hidden_size, config.intermediate_size)
    is_cross = index in config.cross_attention_layers
    attention = _attention(config, False, False, head_norms=is_cross)
    if not is_cross:
        return attention | mlp
    crossed = {name.replace("self_attn", "cross_attn"): size for name, size in attention.items()}
    return crossed | mlp | {"cross_attn_attn_gate": (1,), "cross_attn_mlp_gate": (1,)}


def _zamba2(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of Mamba 2, and where it is hybrid its part of the shared attention.

    The first ``num_mem_blocks`` hybrid layers have an attention that later ones share; each has
    adapters of its own.
    """
    sizes = (config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups)
    rest = (config.mamba_d_state, config.mamba_d_conv)
    mixer = _mamba2("mamba", config.hidden_size, (*sizes, *rest), has_norm=True)
    mixer = _conv_bias(mixer, "mamba", has_bias=True)
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
        shared |= _shared_block(config, wide)
    return {
        **{f"mamba_decoder.{name}": shape for name, shape in mixer.items()},
        **{f"shared_transformer.{name}": shape for name, shape in shared.items()},
        **linear_shapes("linear", hidden, hidden),
    }


def _shared_block(config: SimpleNamespace, wide: int) -> Shapes:
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
    """Return a layer with alternating updates, and keys if it shares no earlier layer's."""
    hidden, own, rank = config.hidden_size, config.hidden_size_per_layer_input, config.laurel_rank
    inner, copies = config.intermediate_size, config.altup_num_inputs
    attention = _attention(config, False, False, head_norms=True)
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


def _kimi_linear(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer with latent keys and values or a delta rule, and experts or an MLP."""
    hidden, count = config.hidden_size, config.num_experts
    if config.layer_types[index] == "full_attention":
        mixer = _latent_attention(config)
    else:
        mixer = _kimi_delta(hidden, config)
    if config.mlp_layer_types[index] != "sparse":
        return mixer | mlp_shapes("mlp", hidden, config.intermediate_size)
    inner = config.moe_intermediate_size
    shared = mlp_shapes("mlp.shared_experts", hidden, inner * config.n_shared_experts)
    bias: Shapes = {"mlp.gate.e_score_correction_bias": (count,)}
    return mixer | _experts(hidden, inner, count) | shared | bias


def _kimi_delta(hidden: int, config: SimpleNamespace) -> Shapes:
    heads, size = config.linear_num_heads, config.linear_head_dim
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


def _minimax(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of attention, or of lightning attention with its decays; and experts."""
    hidden, heads, block = config.hidden_size, config.num_attention_heads, config.block_size
    experts = _experts(hidden, config.intermediate_size, config.num_local_experts)
    if config.layer_types[index] == "full_attention":
        return experts | _attention(config, False, False, head_norms=False)
    width = heads * config.head_dim
    return {
        **experts,
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
    """Return a layer of attention or of the gated delta rule."""
    if config.layer_types[index] == "full_attention":
        return _olmo2(config, index)
    hidden, heads, size = (
        config.hidden_size,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * size
    widths = {"q": keys, "k": keys, "v": values, "g": values, "a": heads, "b": heads}
    tensors = mlp_shapes("mlp", hidden, config.intermediate_size)
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


def _granite_hybrid(config: SimpleNamespace, index: int) -> Shapes:
    """Return a layer of attention or Mamba 2, with a shared MLP and, if there are any, experts."""
    hidden, shared, count = (
        config.hidden_size,
        config.shared_intermediate_size,
        config.num_local_experts,
    )
    tensors = linear_shapes("shared_mlp.input_linear", 2 * shared, hidden)
    tensors |= linear_shapes("shared_mlp.output_linear", hidden, shared)
    if count:
        tensors |= _experts(hidden, config.intermediate_size, count)
    if config.layer_types[index] != "full_attention":
        return tensors | _bamba_mixer(config, has_norm=True)
    bias = bool(config.attention_bias)
    return tensors | _attention(config, bias, bias, head_norms=False)


LAYERS: Mapping[str, Callable[[SimpleNamespace, int], Shapes]] = MappingProxyType(
    {
        "arcee": _arcee,
        "bamba": _bamba,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "exaone4": _exaone4,
        "falcon_h1": _falcon_h1,
        "falcon_mamba": _mamba,
        "glm4_moe_lite": _deepseek,
        "gemma3n_text": _gemma3n,
        "gpt_oss": _gpt_oss,
        "granite": _llama,
        "granitemoehybrid": _granite_hybrid,
        "jamba": _jamba,
        "kimi_linear": _kimi_linear,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2_moe,
        "llama4_text": _llama4,
        "mamba": _mamba,
        "mamba2": _mamba2_alone,
        "minicpm3": _minicpm3,
        "minimax": _minimax,
        "mixtral": _mixtral,
        "mllama_text_model": _mllama,
        "nemotron_h": _nemotron_h,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo2,
        "olmo_hybrid": _olmo_hybrid,
        "phi3": _olmo,
        "qwen2_5_vl_text": _qwen2_vl,
        "qwen2_vl_text": _qwen2_vl,
        "qwen3_5_moe_text": _qwen3_next,
        "qwen3_5_text": _qwen3_5,
        "qwen3_moe": _qwen3_moe,
        "qwen3_next": _qwen3_next,
        "seed_oss": _seed_oss,
        "starcoder2": _starcoder2,
        "youtu": _youtu,
        "zamba2": _zamba2,
    }
)
"""Tensors of a layer without its norms, by model type: families without a compiled pass."""
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
