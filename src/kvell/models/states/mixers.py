"""Our own forward passes of state mixers, over the weights of transformers' modules.

A transformers layer calls a mixer instead of attention: projections, a short convolution, a
recurrence. Only the parts that connect tokens are ours.

There is one mixer of the delta rule for each kind of decay; it takes any family's projections. A
token contributes a query, a key and a value through one short convolution, the strength of its
correction (beta) and that of forgetting (log decay). The output passes a gated norm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from kvell.models.config.state_sizes import MixerKind
from kvell.models.states.delta_scans import ChannelDeltaScan, GatedDeltaScan
from kvell.models.states.scans import ScalarDecayScan, SelectiveScan
from kvell.models.states.state_run import StateRun

NORM_FLOOR = 1e-6
"""Added to a key's squared length."""


@dataclass(frozen=True)
class DeltaInputs:
    """A module's projections of T tokens.

    :param mixed: [T, channels], queries, keys and values side by side.
    :param gate: [T, heads × V].
    :param log_decay: float32 [T, heads], or [T, heads, K].
    :param beta: [T, heads].
    """

    mixed: torch.Tensor
    gate: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


class GatedDeltaMixer:
    """A mixer with one decay per value head; several value heads may share a key head."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._project = _projection(module)
        self._act: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[module.activation]
        self._sizes = [module.key_dim, module.key_dim, module.value_dim]

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        inputs = self._project(self._module, hidden)
        mixed = self._act(run.convolve(inputs.mixed, module.conv1d)).float()
        query, key, value = torch.split(mixed, self._sizes, -1)
        output = run.scan(
            GatedDeltaScan(),
            self._keys(query) * module.head_k_dim**-0.5,
            self._keys(key),
            value.view(len(hidden), module.num_v_heads, module.head_v_dim),
            inputs.log_decay,
            inputs.beta.float(),
        )
        return _gated_output(module, output.to(hidden.dtype), inputs.gate)

    def _keys(self, keys: torch.Tensor) -> torch.Tensor:
        """Map [T, key heads × K] → unit length, repeated for each value head: [T, heads, K]."""
        module = self._module
        keys = _unit_length(keys.view(len(keys), module.num_k_heads, module.head_k_dim))
        return keys.repeat_interleave(module.num_v_heads // module.num_k_heads, 1)


class ChannelDeltaMixer:
    """A mixer with one decay for every number of a key."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._act: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[module.activation]
        self._heads = (module.num_heads, module.head_dim)

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        mixed = self._act(run.convolve(_side_by_side(module, hidden), module.conv1d)).float()
        query, key, value = (part.view(len(hidden), *self._heads) for part in mixed.chunk(3, -1))
        output = run.scan(
            ChannelDeltaScan(),
            _unit_length(query) * module.head_dim**-0.5,
            _unit_length(key),
            value,
            module.forget_gate(hidden[None])[0].float(),
            module.b_proj(hidden).sigmoid().float(),
        )
        gate = module.g_b_proj(module.g_a_proj(hidden))
        return _gated_output(module, output.to(hidden.dtype), gate)


def _projection(module: Any) -> Callable[[Any, torch.Tensor], DeltaInputs]:
    if hasattr(module, "in_proj_qkvz"):
        return _by_key_head
    return _together if hasattr(module, "in_proj_qkv") else _apart


def _by_key_head(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    qkvz = module.in_proj_qkvz(hidden)
    ba = module.in_proj_ba(hidden)
    parts = module.fix_query_key_value_ordering(qkvz[None], ba[None])
    query, key, value, gate, beta, decay = (part[0] for part in parts)
    mixed = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    return DeltaInputs(mixed, gate, _log_decay(module, decay), beta.sigmoid())


def _together(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    decay = module.in_proj_a(hidden)
    beta = module.in_proj_b(hidden).sigmoid()
    mixed = module.in_proj_qkv(hidden)
    gate = module.in_proj_z(hidden)
    return DeltaInputs(mixed, gate, _log_decay(module, decay), beta)


def _apart(module: Any, hidden: torch.Tensor) -> DeltaInputs:
    """Project by one linear each; ``allow_neg_eigval`` lets beta reach 2: a state changes sign."""
    beta = module.b_proj(hidden).sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
    log_decay = _log_decay(module, module.a_proj(hidden))
    return DeltaInputs(_side_by_side(module, hidden), module.g_proj(hidden), log_decay, beta)


def _side_by_side(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], -1)


def _log_decay(module: Any, steps: torch.Tensor) -> torch.Tensor:
    """Return log decays, float32 [T, heads], from step sizes before softplus."""
    rate: torch.Tensor = module.A_log.float().exp()
    return -rate * functional.softplus(steps.float() + module.dt_bias.float())


def _unit_length(keys: torch.Tensor) -> torch.Tensor:
    return keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + NORM_FLOOR)


def _gated_output(module: Any, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Apply the gated norm to each head [T, heads, V], then the output linear."""
    rows = output.flatten(0, 1)
    size = output.shape[-1]
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    linear = module.out_proj if hasattr(module, "out_proj") else module.o_proj
    left: torch.Tensor = linear(norm(rows, gate.reshape(-1, size)).view(len(output), -1))
    return left


Mixer = Callable[[torch.Tensor, StateRun], torch.Tensor]
"""Our own forward pass of one module: [T, hidden] of a step → the same."""


class SelectiveMixer:
    """Mamba 1, with or without norms on dt, B and C."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._ranks = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        x, gate = module.in_proj(hidden).chunk(2, -1)
        x = module.act(run.convolve(x, module.conv1d))
        dt, write, read = torch.split(module.x_proj(x), self._ranks, -1)
        if hasattr(module, "dt_layernorm"):
            dt = module.dt_layernorm(dt)
            write = module.b_layernorm(write)
            read = module.c_layernorm(read)
        dt = functional.linear(dt, module.dt_proj.weight).float()
        output = run.scan(
            SelectiveScan(-module.A_log.float().exp()),
            x.float(),
            functional.softplus(dt + module.dt_proj.bias.float()),
            write.float(),
            read.float(),
        )
        output = (output + x * module.D.float()) * functional.silu(gate)
        return _of(module.out_proj, output.to(hidden.dtype))


class ScalarDecayMixer:
    """Mamba 2, with or without a gated norm and multipliers on its projections."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._heads = (module.num_heads, module.head_dim)
        self._groups = (module.n_groups, module.ssm_state_size)
        self._inner = module.num_heads * module.head_dim
        self._written = module.n_groups * module.ssm_state_size

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        sizes = [self._inner, self._inner + 2 * self._written, module.num_heads]
        gate, mixed, dt = torch.split(self._project(hidden), sizes, -1)
        mixed = module.act(run.convolve(mixed, module.conv1d)).float()
        x, write, read = torch.split(mixed, [self._inner, self._written, self._written], -1)
        x = x.view(len(x), *self._heads)
        dt = functional.softplus(dt.float() + module.dt_bias.float())
        output = run.scan(
            ScalarDecayScan(-module.A_log.float().exp()),
            x,
            dt.clamp(*module.time_step_limit),
            write.view(len(x), *self._groups),
            read.view(len(x), *self._groups),
        )
        output = (output + x * module.D.float()[:, None]).flatten(1)
        if getattr(module, "mamba_rms_norm", True):
            output = module.norm(output, gate)
        else:
            output = output * functional.silu(gate)
        return _of(module.out_proj, output.to(hidden.dtype))

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        module = self._module
        if not hasattr(module, "mup_vector"):
            return _of(module.in_proj, hidden)
        multipliers: torch.Tensor = module.mup_vector[0, 0]
        return _of(module.in_proj, hidden * module.ssm_in_multiplier) * multipliers


class LightningMixer:
    """Lightning attention: keys times values, with a fixed decay per head; no convolution."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._num_heads = module.num_attention_heads

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        mixed = module.act_fn(module.qkv_proj(hidden)).float()
        query, key, value = mixed.view(len(hidden), self._num_heads, -1).chunk(3, -1)
        scan = ScalarDecayScan(-module.slope_rate.float().flatten())
        output = run.scan(scan, value, torch.ones_like(value[..., 0]), key, query)
        output = module.norm(output.to(hidden.dtype).flatten(1))
        return _of(module.out_proj, module.output_gate(hidden).sigmoid() * output)


class ConvolutionMixer:
    """A gated short convolution; its state is its last inputs."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        module = self._module
        before, after, x = module.in_proj(hidden).chunk(3, -1)
        return _of(module.out_proj, after * run.convolve(before * x, module.conv))


MIXERS: dict[MixerKind, Callable[[Any], Mixer]] = {
    "selective": SelectiveMixer,
    "scalar-decay": ScalarDecayMixer,
    "gated-delta": GatedDeltaMixer,
    "channel-delta": ChannelDeltaMixer,
    "lightning": LightningMixer,
    "convolution": ConvolutionMixer,
}
"""Constructors by kind, from transformers' module."""

AS_ATTENTION: frozenset[MixerKind] = frozenset({"lightning"})
"""Kinds that replace an attention module, which returns weights as well as its output."""


def _of(linear: Any, values: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = linear(values)
    return output
