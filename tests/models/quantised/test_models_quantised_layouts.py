"""Matrices of quantised checkpoints, by their makers' layouts and by transformers' own decoding."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvell.errors import ChangeSomething
from kvell.models.families.plain_config import known_config
from kvell.models.fused.grouped import GROUP, Form
from kvell.models.loading.loading import check_model
from kvell.models.loading.model_weights import weight_files_bytes, weights_of
from kvell.models.loading.stored_model import stored_model
from kvell.models.loading.weight_files import WeightMap
from tests.models.harness import tiny_config
from tests.models.quantised.layouts import (
    BLOCKS_OF_128,
    LAYOUTS,
    compressed,
    floats,
    gptq,
    mxfp4,
    save_quantised,
)

OUT, WIDTH = 136, 192
EXACT = ("gptq-8", "packed", "packed-rows", "packed-8")
"""Layouts whose numbers have a form without any rounding."""
BY_NUMBERS = {"gptq-reordered", "gptq-small-groups", "gptq-8-asymmetric", "integers-grouped"} | {
    "integers-asymmetric",
    "floats",
    "floats-rows",
    "fp8",
    "fp8-powers-of-two",
}
"""Layouts whose numbers are quantised again."""


def drawn(out: int = OUT, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(1)) * 0.02


def write(path: Path, tensors: dict[str, torch.Tensor], fields: Any, **plain: torch.Tensor) -> None:
    tiny_config("LlamaForCausalLM").save_pretrained(path)
    save_quantised(path, {f"m.{name}": value for name, value in tensors.items()} | plain, fields)


def read(path: Path) -> WeightMap:
    return weights_of(path, known_config(path))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_matrix_has_the_numbers_of_its_layout(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    tensors, said = layout.write(drawn())
    write(tmp_path, tensors | {"input_scale": torch.ones(1)}, layout.fields, norm=torch.ones(3))
    weights = read(tmp_path)
    assert weights.stored.keys() == {"m.weight", "norm"} == weights.map_tensors().keys()
    assert weights.map_tensors()["m.weight"].shape == (OUT, WIDTH)
    assert weights.stored["m.weight"].shape == (OUT, WIDTH)
    block = weights.blocks()["m.weight"]
    assert block.form is Form[layout.form.upper()]
    assert torch.equal(block.unpack(torch.float32), said)
    assert torch.equal(block.numbers(3, 21), said[3:21])
    made = block.to_form(block.form)
    error = (made.unpack() - said).abs().view(OUT, -1, GROUP).amax(-1)
    largest = said.abs().view(OUT, -1, GROUP).amax(-1)
    half = 2.0**-11
    # Rounding of a group's quants, or of its scale and minimum in half precision.
    bound = largest * (0.51 / 127 + half) if name in BY_NUMBERS else 2.01 * largest * half
    tiny = 2.0**-24
    assert bool((error <= bound + 16 * tiny).all())
    if name in EXACT:
        assert torch.equal(made.unpack(), said)


def test_experts_are_what_transformers_decodes(tmp_path: Path) -> None:
    numbers = torch.randn(3, 64, 20, generator=torch.Generator().manual_seed(1))
    numbers[:, :32] *= 1e-3
    blocks, scales, said = mxfp4(numbers)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs, said)
    name = "experts.down_proj"
    write(
        tmp_path,
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 20)},
        {"quant_method": "mxfp4"},
    )
    weights = read(tmp_path)
    assert weights.map_tensors().keys() == {f"m.{name}", f"m.{name}_bias"}
    assert weights.map_tensors()[f"m.{name}"].shape == said.shape
    made = weights.blocks()[f"m.{name}"].unpack(torch.float32)
    assert torch.equal(made.view(said.shape), theirs)


@pytest.mark.parametrize("exponents", [False, True], ids=["float-scales", "exponents"])
def test_small_floats_are_what_transformers_decodes(tmp_path: Path, exponents: bool) -> None:
    tensors, said = floats(drawn(256, 384), 128, 128, "weight_scale_inv", exponents)
    if exponents:
        scales = tensors["weight_scale_inv"].log2() + 127
        tensors["weight_scale_inv"] = scales.to(torch.uint8)
    decode = Fp8Dequantize(None)._dequantize_one
    theirs = decode(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    assert torch.equal(theirs, said)
    write(tmp_path, tensors, BLOCKS_OF_128)
    assert torch.equal(read(tmp_path).blocks()["m.weight"].unpack(torch.float32), theirs)


def test_sizes_are_those_of_files_and_parameters_those_of_the_model(tmp_path: Path) -> None:
    layout = LAYOUTS["gptq"]
    tensors, _ = layout.write(drawn())
    write(tmp_path, tensors, layout.fields, norm=torch.ones(3))
    size_bytes = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert read(tmp_path).size_bytes == size_bytes == weight_files_bytes(tmp_path)
    assert stored_model(tmp_path, known_config(tmp_path)).parameters == OUT * WIDTH + 3


def wrong(name: str, **changes: torch.Tensor | None) -> tuple[str, dict[str, Any]]:
    return name, changes


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (wrong("gptq", scales=None), "its weights lack m.scales"),
        (wrong("awq", qzeros=None), "its weights lack m.qzeros"),
        (wrong("fp8", weight_scale_inv=None), "its weights lack m.weight_scale_inv"),
        (wrong("packed-asymmetric", weight_zero_point=None), "its weights lack m.weight_zero_poi"),
        (wrong("gptq", scales=torch.ones(4, OUT)), r"m.scales has the shape \(4, 136\) instead"),
        (wrong("fp8", weight_scale_inv=torch.ones(1, 2)), r"has the shape \(1, 2\) instead of"),
        (wrong("gptq", g_idx=torch.zeros(9, dtype=torch.int32)), r"m.g_idx has the shape \(9,\)"),
        (wrong("awq", scales=torch.ones(3, OUT).int()), "its scales m.scales are I32"),
        (wrong("integers", other=torch.ones(3).int()), "m.other is I32, which compressed-tensors"),
        (wrong("gptq", qweight=None), "has no tensor of its quantisation"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, changed: tuple[str, dict[str, Any]], problem: str
) -> None:
    layout = LAYOUTS[changed[0]]
    tensors, _ = layout.write(drawn())
    changes = changed[1]
    kept = {name: value for name, value in (tensors | changes).items() if value is not None}
    write(tmp_path, kept, layout.fields)
    with pytest.raises(ChangeSomething, match=problem):
        read(tmp_path)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(drawn(), 4, 64)
    write(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 80})
    with pytest.raises(ChangeSomething, match="192 inputs, which groups of 80 do not divide"):
        read(tmp_path)


def test_inputs_of_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    tensors, _ = gptq(drawn(), 4, 64)
    tensors["g_idx"][5] = 3
    write(tmp_path, tensors, LAYOUTS["gptq"].fields)
    with pytest.raises(ChangeSomething, match="groups beyond 2"):
        read(tmp_path).blocks()


FOUR = {"num_bits": 4, "strategy": "group", "group_size": 64}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "needs kernels that read them"),
        ({"bits": 4}, r"quantised \(unknown\)"),
        (
            {"quant_method": "gptq", "bits": 3, "group_size": 128},
            "3 bits are not read; only 4 or 8",
        ),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "2 bits are not read"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "only the formats gptq and"),
        ({"quant_method": "gptq", "dynamic": {"-:.*": {}}}, "several quantisations"),
        ({"quant_method": "gptq", "bits": "four"}, "malformed"),
        ({"quant_method": "awq", "version": "gemv"}, "version gemv is not read"),
        ({"quant_method": "awq", "bits": 8}, "8 bits are not read"),
        ({"quant_method": "awq", "group_size": -3}, "groups of -3 inputs"),
        (compressed("pack-quantized", **FOUR) | {"kv_cache_scheme": {"num_bits": 8}}, "keys and"),
        (compressed("marlin-24", **FOUR), "format marlin-24 is not read"),
        (compressed("pack-quantized", **FOUR | {"num_bits": 2}), "2 bits are not read"),
        (
            compressed("pack-quantized", **FOUR | {"strategy": "tensor_group"}),
            "scales by tensor_gr",
        ),
        (compressed("nvfp4-pack-quantized", **FOUR | {"type": "float"}), "is not read"),
        (compressed("pack-quantized", **FOUR) | {"sparsity_config": {"format": "x"}}, "sparse"),
        (compressed("pack-quantized", **FOUR) | {"transform_config": {"a": 1}}, "rotated"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": None, "input_activations": {"num_bits": 8}}},
            },
            "quantises activations alone",
        ),
        (
            compressed("pack-quantized", **FOUR)
            | {"config_groups": {"a": {"weights": FOUR}, "b": {"weights": FOUR | {"num_bits": 8}}}},
            "several quantisations",
        ),
    ],
)
def test_schemes_that_are_not_read_are_refused_by_their_config(
    tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    tiny_config("LlamaForCausalLM").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": fields}))
    with pytest.raises(ChangeSomething, match=problem):
        check_model(tmp_path)
