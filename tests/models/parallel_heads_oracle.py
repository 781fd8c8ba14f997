"""Attention and Mamba heads side by side, written out: whole text, no cache, a token at a time.

From the papers (Hymba eq. 1–3, Mamba alg. 2, RoPE), over the weights alone; nothing of the module
under test or of transformers is called.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import silu, softplus

Weights = Mapping[str, torch.Tensor]


def logits(weights: Weights, config: Any, ids: Sequence[int]) -> torch.Tensor:
    """float64 [tokens, vocab]."""
    weights = {name: value.double() for name, value in weights.items()}
    hidden = weights["model.embed_tokens.weight"][list(ids)]
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        normed = norm(hidden, own["input_layernorm.weight"], config)
        attended = norm(
            attention(own, config, layer, normed, known), own["attention_norm.weight"], config
        )
        recurred = norm(mamba(own, config, normed), own["mamba_norm.weight"], config)
        hidden = hidden + 0.5 * attended + 0.5 * recurred
        normed = norm(hidden, own["post_attention_layernorm.weight"], config)
        gate = silu(normed @ own["mlp.gate_proj.weight"].T)
        hidden = (
            hidden + (gate * (normed @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        )
    return norm(hidden, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T


def norm(values: torch.Tensor, scale: torch.Tensor, config: Any) -> torch.Tensor:
    mean_square = (values**2).mean(-1, keepdim=True)
    return values / torch.sqrt(mean_square + config.rms_norm_eps) * scale


def attention(
    own: Weights,
    config: Any,
    layer: int,
    normed: torch.Tensor,
    known: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    size, count = config.head_dim, len(normed)
    source = next((g[0] for g in config.kv_reuse_group if layer in g[1:]), layer)
    query = rotated((normed @ own["self_attn.q_proj.weight"].T).view(count, -1, size))
    if source == layer:
        key = rotated((normed @ own["self_attn.k_proj.weight"].T).view(count, -1, size))
        known[layer] = key, (normed @ own["self_attn.v_proj.weight"].T).view(count, -1, size)
    key, value = known[source]
    reach = count if layer in config.global_attn_idx else config.sliding_window
    output = torch.zeros_like(query)
    for head in range(query.shape[1]):
        shared = head * key.shape[1] // query.shape[1]
        for at in range(count):
            first = max(0, at - reach + 1)
            scores = key[first : at + 1, shared] @ query[at, head] / math.sqrt(size)
            output[at, head] = scores.softmax(0) @ value[first : at + 1, shared]
    return output.flatten(1) @ own["self_attn.o_proj.weight"].T


def rotated(vectors: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs are (i, i + half), as in Llama's checkpoints; theta is 10,000."""
    half = vectors.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(vectors), dtype=torch.float64)[:, None, None] * rates
    low, high = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def mamba(own: Weights, config: Any, normed: torch.Tensor) -> torch.Tensor:
    weights = {n.removeprefix("mamba."): v for n, v in own.items() if n.startswith("mamba.")}
    x, gate = (normed @ weights["in_proj.weight"].T).chunk(2, -1)
    places = weights["conv1d.weight"][:, 0]
    padded = torch.cat((x.new_zeros(config.mamba_d_conv - 1, x.shape[1]), x))
    x = torch.stack(
        [(padded[at : at + config.mamba_d_conv] * places.T).sum(0) for at in range(len(x))]
    )
    x = silu(x + weights["conv1d.bias"])
    rank, size = config.mamba_dt_rank, config.mamba_d_state
    dt, write, read = torch.split(x @ weights["x_proj.weight"].T, [rank, size, size], -1)
    dt = norm(dt, weights["dt_layernorm.weight"], config)
    write = norm(write, weights["b_layernorm.weight"], config)
    read = norm(read, weights["c_layernorm.weight"], config)
    dt = softplus(dt @ weights["dt_proj.weight"].T + weights["dt_proj.bias"])
    decay = -weights["A_log"].exp()
    state, output = torch.zeros_like(decay), torch.zeros_like(x)
    for at in range(len(x)):
        step = dt[at][:, None]
        state = (step * decay).exp() * state + step * write[at] * x[at][:, None]
        output[at] = state @ read[at] + weights["D"] * x[at]
    return (output * silu(gate)) @ weights["out_proj.weight"].T
