"""Every type of GGUF's matrices, in compiled code and by modules, and models of several types."""

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from kvell.attention.choice import choose_kernels
from kvell.models.fused.grouped import Form
from kvell.models.gguf.gguf_tensors import EIGHT_BITS, FLOATS, FOUR_BITS
from kvell.models.loading.block_forms import row_blocks
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.model_weights import weights_of
from kvell.models.sources.gguf_directory import gguf_directory
from kvell.models.sources.packaged import gguf_file
from kvell.models.text.tokenizer import Tokenizer, tokenizer_or_none
from tests.models.gguf.gguf_models import Bytes, Matrix, Writer, family_module, random_rows, type_of
from tests.models.harness import assert_exact, oracle_logits, prompt_ids, runner_over

CPU = torch.device("cpu")
BLOCKS = (*FOUR_BITS, *EIGHT_BITS)
ERRORS = dict.fromkeys(BLOCKS, 6e-3) | dict.fromkeys(("Q4_0", "Q4_1", "Q8_0"), 0.0) | {"Q4_K": 4e-4}
"""The largest error of a type's form, as a part of the weights' root mean square."""
ANSWER_ERRORS = {0.0: 1e-4, 4e-4: 1e-2, 6e-3: 0.15}
"""The largest error of a log probability, by the error of a form's numbers."""


def log_probability_error(file: Path, module: object, ids: list[int], *, fused: bool) -> float:
    """The largest error of a log probability of a token among the likeliest 20."""
    directory = gguf_directory(file, file.parent / "cache")
    model = load_paged_model(directory, choose_kernels(CPU), fused=fused)
    ours = runner_over(model).step([("a", ids)]).log_softmax(-1)
    theirs = oracle_logits(module, ids).log_softmax(-1)
    places = theirs.topk(20).indices
    return float((ours - theirs).gather(-1, places).abs().max())


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_in_a_form_are_those_of_the_library(kind: str) -> None:
    rows = random_rows(kind, 40, 512, seed=1)
    numbers = torch.from_numpy(gguf.dequantize(rows, type_of(kind)))
    form = Form.INT4 if kind in FOUR_BITS else Form.INT8
    order = np.random.default_rng(0).permutation(40)
    block = row_blocks(rows, kind, order)
    assert (block.kind, block.form, block.shape) == (kind, form, (40, 512))
    assert torch.equal(block.unpack(torch.float32), numbers[order])
    made = block.to_form(form)
    assert made.form is form
    off = (made.unpack() - numbers[order]).square().mean().sqrt()
    assert float(off / numbers.square().mean().sqrt()) <= ERRORS[kind] + 1e-7
    assert block.to_form(Form.INT8).form is Form.INT8


@pytest.mark.parametrize("kind", [*BLOCKS, *FLOATS])
def test_a_model_of_one_type_answers_within_its_error(kind: str, tmp_path: Path) -> None:
    module, ids = family_module("llama"), prompt_ids(24)
    Writer("llama", module, lambda _: kind).write(tmp_path / "model.gguf")
    bound = ANSWER_ERRORS[ERRORS.get(kind, 0.0)]
    assert log_probability_error(tmp_path / "model.gguf", module, ids, fused=True) <= bound


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_1"])
def test_modules_have_the_blocks_own_numbers(kind: str, tmp_path: Path) -> None:
    module, ids = family_module("qwen3"), prompt_ids(24)
    Writer("qwen3", module, lambda _: kind).write(tmp_path / "model.gguf")
    assert log_probability_error(tmp_path / "model.gguf", module, ids, fused=False) <= 1e-4


def medium(name: str) -> str:
    """The types of a Q4_K_M file, and one of values beside quantised queries."""
    if name in ("token_embd.weight", "output.weight") or "ffn_down" in name:
        return "Q6_K"
    return {"blk.0.attn_v.weight": "Q6_K", "blk.1.attn_v.weight": "F16"}.get(name, "Q4_K")


def small(name: str) -> str:
    return "Q3_K" if "attn" in name else "Q5_K" if "ffn_up" in name else "IQ4_NL"


@pytest.mark.parametrize("kinds", [medium, small])
@pytest.mark.parametrize("family", ["falcon-h1", "gemma2", "qwen2", "smollm3"])
def test_a_model_of_several_types_in_parts(
    family: str, kinds: Callable[[str], str], tmp_path: Path
) -> None:
    module, ids = family_module(family, scale=2.0), prompt_ids(24)
    Writer(family, module, kinds).write(tmp_path / "model.gguf", parts_of=7)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(parts) > 2
    error = log_probability_error(parts[1], module, ids, fused=True)
    assert 0 < error <= ANSWER_ERRORS[6e-3]


def quantised_six(numbers: Matrix) -> Bytes:
    """Q6_K: 16 groups of 16 numbers from -32 to 31, with scales of 8 bits."""
    blocks = numbers.reshape(-1, 16, 16)
    scales = np.abs(blocks).max(-1) / 31
    factors = (scales.max(-1, keepdims=True) / 127).astype(np.float16)
    wide = np.where(factors == 0, 1, factors).astype(np.float32)
    steps = np.round(scales / wide).astype(np.int8)
    sizes = np.where(steps == 0, 1, steps)[..., None] * wide[..., None]
    quants = (np.round(blocks / sizes).clip(-32, 31) + 32).astype(np.uint8)
    low, high = (quants & 15).reshape(-1, 2, 2, 64), (quants >> 4).reshape(-1, 2, 4, 32)
    lows = (low[:, :, 0] | low[:, :, 1] << 4).reshape(len(blocks), 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    highs = np.bitwise_or.reduce(high << shifts, 2).reshape(len(blocks), 64)
    parts = [lows, highs, steps.view(np.uint8), factors.view(np.uint8)]
    return np.concatenate(parts, -1).reshape(numbers.shape[0], -1)


def quantised_four(numbers: Matrix) -> Bytes:
    """Q4_K: 8 groups of 32 numbers from 0 to 15, with 6-bit scales and minima."""
    blocks = numbers.reshape(-1, 8, 32)
    minima = np.maximum(-blocks.min(-1), 0)
    scales = (blocks.max(-1) + minima).clip(0) / 15
    halves = [(part.max(-1, keepdims=True) / 63).astype(np.float16) for part in (scales, minima)]
    wide = [np.where(half == 0, 1, half).astype(np.float32) for half in halves]
    sixes = [
        np.round(part / unit).astype(np.uint8)
        for part, unit in zip((scales, minima), wide, strict=True)
    ]
    sizes = np.where(sixes[0] == 0, 1, sixes[0])[..., None] * wide[0][..., None]
    lows = (sixes[1] * wide[1])[..., None]
    quants = np.round((blocks + lows) / sizes).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in sixes]
    packed.append(sixes[0][:, 4:] & 15 | (sixes[1][:, 4:] & 15) << 4)
    nibbles = (quants[:, :, 0] | quants[:, :, 1] << 4).reshape(len(blocks), 128)
    parts = [*(half.view(np.uint8) for half in halves), *packed, nibbles]
    return np.concatenate(parts, -1).reshape(numbers.shape[0], -1)


def write_medium(source: Path, path: Path) -> None:
    """Write the packaged model again in llama.cpp's types of Q4_K_M."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            inner = field.types[1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = "F32"
        if numbers.ndim == 2:
            kind = medium(tensor.name)
            if "ffn_down" in tensor.name and int(tensor.name.split(".")[1]) % 2:
                kind = "Q4_K"
            if numbers.shape[1] % 256:
                kind = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}.get(kind, kind)
        own = {"Q6_K": quantised_six, "Q4_K": quantised_four}.get(kind)
        data = gguf.quantize(numbers, type_of(kind)) if own is None else own(numbers)
        writer.add_tensor(tensor.name, data, raw_dtype=type_of(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TEXT = (
    "The sea swells when the wind blows long enough over open water. Waves that leave a storm are "
    "sorted by their length: long ones travel faster, and arrive first. A swell may cross half an "
    "ocean and still raise a ship that has not felt any wind for days. Sailors read it as a letter "
    "from a place they cannot see, and they know from its period how far away it was written."
)


@pytest.mark.long
def test_the_packaged_model_as_a_medium_file(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its perplexity is that of the file's own numbers in float32, within 1 %."""
    file = tmp_path / "model-Q4_K_M.gguf"
    write_medium(gguf_file(), file)
    directory = gguf_directory(file, tmp_path)
    weights = weights_of(directory)
    assert {block.kind for block in weights.blocks().values()} == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    oracle = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    parameters = dict(oracle.named_parameters())
    for name, block in weights.blocks().items():
        parameters[name].data = block.unpack(torch.float32)
    ids = smollm2_tokenizer.encode(TEXT).tolist()
    targets = torch.tensor(ids[1:])
    kernels = choose_kernels(CPU)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_paged_model(directory, kernels, dtype)
        ours = runner_over(model, large_pages=64).step([("a", ids)])[:-1]
        theirs = oracle_logits(oracle, ids)[:-1]
        losses = [float(cross_entropy(logits, targets)) for logits in (ours, theirs)]
        assert math.exp(abs(losses[0] - losses[1])) <= 1.01


def test_the_packaged_file_is_the_packaged_model(
    smollm2_path: Path, smollm2_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its numbers in float32 are those of the converted model, and its blocks those of int4."""
    directory = gguf_directory(gguf_file(), tmp_path)
    tokenizer = tokenizer_or_none(directory)
    ids = smollm2_tokenizer.encode(TEXT).tolist()
    assert tokenizer.encode(TEXT).tolist() == ids
    kernels = choose_kernels(CPU)
    logits = [
        runner_over(load_paged_model(path, kernels, dtype, quantization=form), large_pages=64).step(
            [("a", ids)]
        )
        for path, dtype, form in (
            (directory, torch.float32, "none"),
            (smollm2_path, torch.float32, "none"),
            (directory, torch.bfloat16, "none"),
            (smollm2_path, torch.bfloat16, "int4"),
        )
    ]
    assert_exact(logits[0], logits[1])
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))
    assert torch.equal(logits[2], logits[3])
