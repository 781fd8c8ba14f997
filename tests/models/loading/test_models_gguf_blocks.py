"""Blocks of a GGUF file: read as they are, found again by their numbers."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from kvell.attention.choice import choose_kernels
from kvell.models.fused.grouped import Form
from kvell.models.loading.block_forms import row_blocks
from kvell.models.loading.gguf_blocks import BLOCKS_FILE, TYPES, blocks_of, write_blocks
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.weight_files import SINGLE_FILE, read_weight_map
from kvell.models.text.tokenizer import Tokenizer
from tests.models.harness import oracle_logits, runner_over


def drawn(
    out: int, width: int, seed: int = 0
) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    return np.random.default_rng(seed).standard_normal((out, width)).astype(np.float32)


def rows_of(
    numbers: "np.ndarray[tuple[int, int], np.dtype[np.float32]]", kind: str
) -> torch.Tensor:
    made = gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.asarray(made))


@pytest.mark.parametrize("kind", TYPES)
def test_rows_say_what_the_library_says(kind: str) -> None:
    rows = rows_of(drawn(6, 96), kind)
    block = row_blocks(rows.numpy(), kind)
    said = torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))
    assert block.form is (Form.INT8 if kind == "Q8_0" else Form.INT4)
    assert torch.equal(block.to_form(block.form).unpack(), said)
    assert torch.equal(block.unpack(torch.float32), said)


def write_source(path: Path, kinds: dict[str, str]) -> dict[str, torch.Tensor]:
    """A GGUF file of random matrices; what its blocks say."""
    writer, said = gguf.GGUFWriter(path, "llama"), {}
    for seed, (name, kind) in enumerate(kinds.items()):
        rows = rows_of(drawn(8, 64, seed), kind)
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, rows.numpy(), raw_dtype=quantised)
        said[name] = torch.from_numpy(gguf.dequantize(rows.numpy(), quantised))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return said


def test_weights_find_their_blocks_whatever_the_order_of_their_rows(tmp_path: Path) -> None:
    kinds = {"a": "Q4_1", "b": "Q8_0", "c": "Q4_1"}
    said = write_source(tmp_path / "model.gguf", kinds)
    turned = said["a"][torch.tensor([3, 0, 1, 7, 6, 5, 4, 2])]
    other = torch.from_numpy(drawn(8, 64, 9))
    mixed = torch.cat([said["a"][:4], said["c"][:4]])
    weights = {"q": turned, "head": said["b"], "new": other, "mixed": mixed, "norm": other[0]}
    save_file({name: w.numpy().copy() for name, w in weights.items()}, tmp_path / SINGLE_FILE)
    assert blocks_of(read_weight_map(tmp_path)) == {}, "a model with no source brings none"
    write_blocks(tmp_path / "model.gguf", read_weight_map(tmp_path))
    blocks = blocks_of(read_weight_map(tmp_path))
    assert set(blocks) == {"q", "head"}
    assert torch.equal(blocks["q"].unpack(torch.float32), turned)
    assert torch.equal(blocks["head"].unpack(torch.float32), said["b"])


def test_blocks_of_weights_that_were_replaced_are_not_read(tmp_path: Path) -> None:
    said = write_source(tmp_path / "model.gguf", {"a": "Q4_1"})
    save_file({"w": said["a"].numpy()}, tmp_path / SINGLE_FILE)
    write_blocks(tmp_path / "model.gguf", read_weight_map(tmp_path))
    assert set(blocks_of(read_weight_map(tmp_path))) == {"w"}
    save_file({"w": drawn(8, 64, 3)}, tmp_path / SINGLE_FILE)
    os.utime(tmp_path / SINGLE_FILE, ns=(1, 1))
    assert blocks_of(read_weight_map(tmp_path)) == {}


def test_bytes_that_have_no_magnitude_are_quantised_again(tmp_path: Path) -> None:
    rows = rows_of(drawn(8, 64), "Q8_0")
    rows.view(torch.int8)[3, 10] = -128
    made = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a", rows.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file({"w": made}, tmp_path / SINGLE_FILE)
    write_blocks(tmp_path / "model.gguf", read_weight_map(tmp_path))
    weight = blocks_of(read_weight_map(tmp_path))["w"].to_form(Form.INT8)
    numbers = torch.from_numpy(made)
    assert int(weight.quants.min()) >= -127
    assert float((weight.unpack() - numbers).abs().max()) <= float(numbers.abs().max()) / 127


def test_the_packaged_model_is_served_as_it_is(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer
) -> None:
    """Every matrix has its blocks' own numbers; int4 errs less than transformers in bfloat16."""
    blocks = blocks_of(read_weight_map(smollm2_path))
    assert (smollm2_path / BLOCKS_FILE).is_file()
    with safe_open(smollm2_path / SINGLE_FILE, "pt") as weights:
        matrices = [name for name in weights.keys() if "norm" not in name]  # noqa: SIM118
        assert set(blocks) == set(matrices)
        for name in matrices[::17]:
            assert torch.equal(blocks[name].unpack(torch.float32), weights.get_tensor(name))
    ids = smollm2_tokenizer.encode("In the beginning the universe was created. " * 3).tolist()
    kernels = choose_kernels(torch.device("cpu"))
    if kernels.name != "native":
        pytest.skip("built without a compiler")
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    exact = oracle_logits(oracle, ids)
    theirs = oracle_logits(oracle.bfloat16(), ids)
    model = load_paged_model(smollm2_path, kernels, torch.bfloat16, quantization="int4")
    runner = runner_over(model)
    ours = torch.cat([runner.step([("a", ids[:9])]), runner.step([("a", ids[9:])])])
    errors = [float((x - exact).double().square().mean().sqrt()) for x in (ours, theirs)]
    assert 0 < errors[0] <= 1.25 * errors[1]
    assert model.weight_bytes < 105e6
