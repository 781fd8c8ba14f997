"""Our own forward passes of state mixers, over the weights of transformers' modules.

A transformers layer calls a mixer instead of attention: projections, a short convolution, a
recurrence. Only the parts that connect tokens are ours.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from kvell.models.config.state_sizes import MixerKind
from kvell.models.states.delta_mixers import ChannelDeltaMixer, GatedDeltaMixer
from kvell.models.states.scans import ScalarDecayScan, SelectiveScan
from kvell.models.states.state_pages import StateShapes
from kvell.models.states.state_run import StateRun


class Mixer(Protocol):
    """Our own forward pass of one module.

    :ivar shapes: of the state that it keeps.
    """

    shapes: StateShapes

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        """Map hidden states of a ragged batch [T, hidden] → [T, hidden]."""
        ...


class SelectiveMixer:
    """Mamba 1, with or without norms on dt, B and C."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._ranks = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        inner, state = module.intermediate_size, module.ssm_state_size
        self.shapes = StateShapes(inner, module.conv_kernel_size - 1, (inner, state))

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        """Map hidden states of a ragged batch [T, hidden] → [T, hidden]."""
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
        channels = self._inner + 2 * self._written
        recurrent = (*self._heads, module.ssm_state_size)
        self.shapes = StateShapes(channels, module.conv_kernel_size - 1, recurrent)

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        """Map hidden states of a ragged batch [T, hidden] → [T, hidden]."""
        module = self._module
        sizes = [self._inner, self.shapes.channels, module.num_heads]
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
        self._heads = (module.num_attention_heads, module.head_dim)
        self.shapes = StateShapes(0, 0, (*self._heads, module.head_dim))

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        """Map hidden states of a ragged batch [T, hidden] → [T, hidden]."""
        module = self._module
        mixed = module.act_fn(module.qkv_proj(hidden)).float()
        query, key, value = mixed.view(len(hidden), self._heads[0], -1).chunk(3, -1)
        scan = ScalarDecayScan(-module.slope_rate.float().flatten())
        output = run.scan(scan, value, torch.ones_like(value[..., 0]), key, query)
        output = module.norm(output.to(hidden.dtype).flatten(1))
        return _of(module.out_proj, module.output_gate(hidden).sigmoid() * output)


class ConvolutionMixer:
    """A gated short convolution; its state is its last inputs."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.shapes = StateShapes(module.conv.in_channels, module.conv_kernel_size - 1, ())

    def __call__(self, hidden: torch.Tensor, run: StateRun) -> torch.Tensor:
        """Map hidden states of a ragged batch [T, hidden] → [T, hidden]."""
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
