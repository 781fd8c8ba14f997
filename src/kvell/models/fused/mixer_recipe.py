"""The recipe of a state mixer next to attention, from its module; None if it is unusual.

These are mixers with one decay per head (Mamba 2: Dao and Gu 2024, §7), with or without a gated
norm and multipliers on their projections, as ``models/states/mixers`` computes them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from kvell.models.fused.parts import NormRecipe, ScaledLinear

LANES = 16
"""Rows of the convolution are padded to a multiple of it (csrc/forward/mixer.h)."""
MOST_WINDOW = 7
_PARTS = {"act", "conv1d", "in_proj", "norm", "out_proj"}
_SILU = {"SiLU", "SiLUActivation"}


@dataclass(frozen=True)
class MixerShape:
    """Sizes that all mixers of a model share.

    :param window: earlier inputs that the convolution reads.
    """

    heads: int
    head_size: int
    groups: int
    state_size: int
    window: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        return self.inner + self.channels + self.heads

    @property
    def mixed(self) -> int:
        return -(-self.channels // LANES) * LANES


@dataclass(frozen=True)
class MixerRecipe:
    """One layer's mixer; all tensors are float32 and contiguous.

    :param convolution: [window + 1, mixed], the last place for the token itself.
    :param convolution_bias: [mixed].
    :param decays: [heads], negative: change of the logarithm per unit of time; ``step_bias`` and
        ``skips`` are [heads] too.
    :param steps: the smallest and the largest step size.
    :param norm: applied to each group of heads separately; weight [inner].
    :param out_factor: multiplies the mixer's addition to the stream.
    """

    shape: MixerShape
    in_proj: ScaledLinear
    out_proj: Any
    convolution: torch.Tensor
    convolution_bias: torch.Tensor
    step_bias: torch.Tensor
    decays: torch.Tensor
    skips: torch.Tensor
    steps: tuple[float, float]
    norm: NormRecipe | None
    norm_before_gate: bool
    out_factor: float


def mixer_recipe(module: Any, out_factor: float) -> MixerRecipe | None:
    """Return the recipe of a transformers mixer; None if any part of it is unusual."""
    shape = MixerShape(
        int(module.num_heads),
        int(module.head_dim),
        int(module.n_groups),
        int(module.ssm_state_size),
        int(module.conv_kernel_size) - 1,
    )
    if not _plain(module, shape):
        return None
    convolution = module.conv1d
    pad = (0, shape.mixed - shape.channels)
    weight = convolution.weight.detach().squeeze(1).t()
    bias = weight[0] * 0 if convolution.bias is None else convolution.bias.detach()
    multipliers = getattr(module, "mup_vector", None)
    outputs = 1.0 if multipliers is None else multipliers.detach().float().flatten()
    least, most = module.time_step_limit
    return MixerRecipe(
        shape=shape,
        in_proj=ScaledLinear(module.in_proj, getattr(module, "ssm_in_multiplier", 1.0), outputs),
        out_proj=module.out_proj,
        convolution=_numbers(functional.pad(weight, pad)),
        convolution_bias=_numbers(functional.pad(bias, pad)),
        step_bias=_numbers(module.dt_bias),
        decays=-_numbers(module.A_log).exp(),
        skips=_numbers(module.D),
        steps=(float(least), float(most)),
        norm=_norm(module),
        norm_before_gate=bool(getattr(module.norm, "norm_before_gate", False)),
        out_factor=out_factor,
    )


def _plain(module: Any, shape: MixerShape) -> bool:
    """Return whether the module has the usual parts, of sizes that the compiled pass supports."""
    norm = module.norm
    return (
        {name for name, _ in module.named_children()} == _PARTS
        and type(module.act).__name__ in _SILU
        and all(type(linear) is nn.Linear for linear in (module.in_proj, module.out_proj))
        and module.in_proj.out_features == shape.projected
        and module.out_proj.in_features == shape.inner
        and tuple(module.conv1d.weight.shape) == (shape.channels, 1, shape.window + 1)
        and 1 <= shape.window <= MOST_WINDOW
        and shape.heads % shape.groups == 0
        and (not module.mamba_rms_norm or norm.n_groups == shape.groups)
    )


def _norm(module: Any) -> NormRecipe | None:
    if not module.mamba_rms_norm:
        return None
    return NormRecipe(_numbers(module.norm.weight), float(module.norm.variance_epsilon))


def _numbers(values: torch.Tensor) -> torch.Tensor:
    return values.detach().float().contiguous()
