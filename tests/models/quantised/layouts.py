"""Quantised checkpoints of random models, written by the documented layouts of their makers.

Each writer returns a matrix's tensors and the numbers that they stand for, float32. Packing is by
loops over places of a word, and shares nothing with the code that is tested.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from kvell.models.loading.random_weights import random_module
from tests.models.harness import tiny_config

Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order: place i of a word has output 8 word + AWQ_ORDER[i]."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320}
"""Sizes of which groups of 64 are whole, and blocks of 128 are not."""


@dataclass(frozen=True)
class Layout:
    """A scheme with the fields of its config, and its writer.

    :param form: the form that compiled code reads it into.
    """

    fields: Mapping[str, Any]
    write: Callable[[torch.Tensor], Written]
    form: str


def words(quants: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack [rows, n] unsigned numbers → int32 [rows, n · bits / 32]."""
    each = 32 // bits
    made = torch.zeros(quants.shape[0], quants.shape[1] // each, dtype=torch.int64)
    for place in range(each):
        column = place if order is None else order[place]
        made |= quants[:, column::each].long() << (bits * place)
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def in_groups(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quants [out, in], unsigned; scales in half precision and zero points [out, groups]."""
    rows = weight.view(weight.shape[0], -1, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = (rows.abs().amax(-1) / (most // 2)).half()
        zeros = torch.full_like(scales, 1 << (bits - 1)).long()
    else:
        low, high = rows.amin(-1).clamp_max(0), rows.amax(-1).clamp_min(0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    quants = (rows / scales.float()[..., None]).round() + zeros[..., None]
    return quants.clamp(0, most).long().flatten(1), scales, zeros


def spread(values: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    return (
        values.float()
        .repeat_interleave(rows, 0)[: shape[0]]
        .repeat_interleave(columns, 1)[:, : shape[1]]
    )


def awq(weight: torch.Tensor, group: int) -> Written:
    quants, scales, zeros = in_groups(weight, 4, group, symmetric=False)
    tensors = {
        "qweight": words(quants.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    said = (quants - spread(zeros, 1, group, weight.shape)) * spread(scales, 1, group, weight.shape)
    return tensors, said


def gptq(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    reordered: bool = False,
    version: int = 1,
) -> Written:
    width = weight.shape[1]
    order = torch.arange(width)
    if reordered:
        order = torch.randperm(width, generator=torch.Generator().manual_seed(7))
    quants, scales, zeros = in_groups(weight[:, order], bits, group, symmetric)
    said = (quants - spread(zeros, 1, group, weight.shape)) * spread(scales, 1, group, weight.shape)
    back = order.argsort()
    stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
    tensors = {
        "qweight": words(quants[:, back], bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": (back // group).to(torch.int32),
    }
    return tensors, said[:, back]


def packed(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = True) -> Written:
    group = group or weight.shape[1]
    quants, scales, zeros = in_groups(weight, bits, group, symmetric)
    scales = scales.bfloat16()
    tensors = {
        "weight_packed": words(quants, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    said = (quants - spread(zeros, 1, group, weight.shape)) * spread(scales, 1, group, weight.shape)
    return tensors, said


def integers(
    weight: torch.Tensor, group: int, *, lowest: int = -127, has_zeros: bool = False
) -> Written:
    group = group or weight.shape[1]
    rows = weight.view(weight.shape[0], -1, group)
    scales = rows.abs().amax(-1) / 127
    zeros = torch.zeros_like(scales).long()
    if has_zeros:
        zeros[::2] = 9
    quants = ((rows / scales[..., None]).round() + zeros[..., None]).clamp(-128, 127)
    quants = quants.to(torch.int8).flatten(1)
    quants[1, 3] = lowest
    tensors = {"weight": quants, "weight_scale": scales}
    if has_zeros:
        tensors["weight_zero_point"] = zeros.to(torch.int8)
    said = (quants.float() - spread(zeros, 1, group, weight.shape)) * spread(
        scales, 1, group, weight.shape
    )
    return tensors, said


def floats(
    weight: torch.Tensor, rows: int, columns: int, name: str, powers: bool = False
) -> Written:
    """Small floats by blocks; 0 rows or columns are all."""
    out, width = weight.shape
    tall, wide = rows or out, columns or width
    grid = [
        [weight[r : r + tall, c : c + wide].abs().max() / 448 for c in range(0, width, wide)]
        for r in range(0, out, tall)
    ]
    scales = torch.tensor(grid)
    if powers:
        scales = scales.log2().ceil().exp2()
    over = spread(scales, tall, wide, weight.shape)
    numbers = (weight / over).to(torch.float8_e4m3fn)
    stored = scales.flatten() if scales.numel() == 1 else scales
    return {"weight": numbers, name: stored}, numbers.float() * over


def mxfp4(experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [experts, out, groups, 16] and scales of [experts, in, out], and what they say."""
    turned = experts.transpose(1, 2)
    rows = turned.reshape(*turned.shape[:2], -1, 32)
    exponents = (rows.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    table = torch.tensor(FP4)
    scaled = rows / exponents.exp2()[..., None]
    codes = (scaled[..., None] - table).abs().argmin(-1)
    said = (table[codes] * exponents.exp2()[..., None]).flatten(-2).transpose(1, 2)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), said


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq_fields(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


BLOCKS_OF_128 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
LAYOUTS: dict[str, Layout] = {
    "awq": Layout(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        lambda weight: awq(weight, 64),
        "int4",
    ),
    "gptq": Layout(_gptq_fields(4, 64), lambda weight: gptq(weight, 4, 64), "int4"),
    "gptq-v2": Layout(
        _gptq_fields(4, 32, checkpoint_format="gptq_v2"),
        lambda weight: gptq(weight, 4, 32, version=2),
        "int4",
    ),
    "gptq-reordered": Layout(
        _gptq_fields(4, 64, desc_act=True),
        lambda weight: gptq(weight, 4, 64, reordered=True),
        "int8",
    ),
    "gptq-small-groups": Layout(_gptq_fields(4, 16), lambda weight: gptq(weight, 4, 16), "int8"),
    "gptq-8": Layout(
        _gptq_fields(8, 64), lambda weight: gptq(weight, 8, 64, symmetric=True), "int8"
    ),
    "gptq-8-asymmetric": Layout(_gptq_fields(8, 64), lambda weight: gptq(weight, 8, 64), "int8"),
    "packed": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
        lambda weight: packed(weight, 4, 32),
        "int4",
    ),
    "packed-rows": Layout(
        compressed("pack-quantized", num_bits=4, strategy="channel"),
        lambda weight: packed(weight, 4, 0),
        "int4",
    ),
    "packed-asymmetric": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=64, symmetric=False),
        lambda weight: packed(weight, 4, 64, symmetric=False),
        "int4",
    ),
    "packed-8": Layout(
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=64),
        lambda weight: packed(weight, 8, 64),
        "int8",
    ),
    "integers": Layout(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        lambda weight: integers(weight, 0),
        "int8",
    ),
    "integers-grouped": Layout(
        compressed("int-quantized", num_bits=8, strategy="group", group_size=64),
        lambda weight: integers(weight, 64, lowest=-128),
        "int8",
    ),
    "integers-asymmetric": Layout(
        compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
        lambda weight: integers(weight, 0, has_zeros=True),
        "int8",
    ),
    "floats": Layout(
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda weight: floats(weight, 0, 0, "weight_scale"),
        "int8",
    ),
    "floats-rows": Layout(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda weight: floats(weight, 1, 0, "weight_scale"),
        "int8",
    ),
    "fp8": Layout(
        BLOCKS_OF_128, lambda weight: floats(weight, 128, 128, "weight_scale_inv"), "int8"
    ),
    "fp8-powers-of-two": Layout(
        BLOCKS_OF_128, lambda weight: floats(weight, 128, 128, "weight_scale_inv", True), "int8"
    ),
}


def write_checkpoint(path: Path, architecture: str, layout: Layout, **sizes: Any) -> Any:
    """Write a random model with quantised linears; return the module with the numbers they have."""
    config = tiny_config(architecture, **WIDE | sizes)
    module = random_module(config, seed=5)
    module.save_pretrained(path)
    tensors: Tensors = {}
    from safetensors.torch import load_file

    for name, tensor in load_file(path / "model.safetensors").items():
        if not _is_quantised(name, tensor):
            tensors[name] = tensor
            continue
        parts, said = layout.write(tensor.float())
        prefix = name.removesuffix("weight")
        tensors |= {prefix + part: value.contiguous() for part, value in parts.items()}
        if (prefix.rstrip(".").rpartition(".")[2]) == "o_proj":
            tensors[f"{prefix}input_scale"] = torch.ones(1)
        _put(module, name, said)
    save_quantised(path, tensors, layout.fields)
    module.set_attn_implementation("eager")
    return module


def write_experts(path: Path) -> Any:
    """Write a random gpt-oss with its experts in mxfp4; return the module with their numbers."""
    module = random_module(tiny_config("GptOssForCausalLM", **WIDE), seed=5)
    module.save_pretrained(path)
    tensors: Tensors = {}
    for name, tensor in module.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.ndim == 3:
            blocks, scales, said = mxfp4(tensor)
            tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
            tensor.copy_(said)
        else:
            tensors[name] = tensor
    save_quantised(path, tensors, {"quant_method": "mxfp4"})
    module.set_attn_implementation("eager")
    return module


def save_quantised(path: Path, tensors: Tensors, fields: Mapping[str, Any]) -> None:
    save_file(
        {name: value.clone().contiguous() for name, value in tensors.items()},
        path / "model.safetensors",
    )
    file = path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"quantization_config": dict(fields)}))


def _is_quantised(name: str, tensor: torch.Tensor) -> bool:
    kept = ("embed_tokens", "lm_head", "norm", "gate.weight", "router")
    return name.endswith("weight") and tensor.ndim == 2 and not any(k in name for k in kept)


def _put(module: nn.Module, name: str, said: torch.Tensor) -> None:
    """Put numbers in place of a weight of a file; those of experts may be rows of one parameter."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        if name in parameters:
            parameters[name].copy_(said)
            return
        owner, number, projection, _ = name.rsplit(".", 3)
        if projection == "down_proj":
            parameters[f"{owner}.down_proj"][int(number)].copy_(said)
            return
        both = parameters[f"{owner}.gate_up_proj"][int(number)]
        half = both.shape[0] // 2
        (both[:half] if projection == "gate_proj" else both[half:]).copy_(said)
