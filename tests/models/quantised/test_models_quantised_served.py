"""Quantised checkpoints as they are served, compared with transformers over their numbers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvell.attention.choice import choose_kernels
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.models.fused.grouped import GROUP
from kvell.models.loading.loading import load_paged_model
from kvell.sampling_params import SamplingParams
from kvell.vocabulary import MIB
from tests.models.cases import covering
from tests.models.harness import assert_exact, oracle_logits, prompt_ids, runner_over
from tests.models.quantised.layouts import LAYOUTS, save_quantised, write_checkpoint, write_experts
from tests.models.quantised.test_models_quantised_layouts import BY_NUMBERS

CPU = torch.device("cpu")
IDS = prompt_ids(40)
DENSE = ("Gemma3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM")
EXPERTS = {"Qwen3MoeForCausalLM": {"moe_intermediate_size": 64}, "DeepseekV3ForCausalLM": {}}
native = pytest.importorskip("kvell.attention.native")


def served_logits(model: Any) -> torch.Tensor:
    runner = runner_over(model)
    return torch.cat([runner.step([("a", IDS[:9])]), runner.step([("a", IDS[9:])])])


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def rounded(module: Any, by_numbers: bool) -> Any:
    """The module with noise of a form's size: of each number, or of each group of 32."""
    made = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.ndim != 2 or "embed" in name or "lm_head" in name:
                continue
            groups = weight.view(weight.shape[0], -1, GROUP)
            largest = groups.abs().amax(-1, keepdim=True)
            step = largest / 254 if by_numbers else largest * 2.0**-11
            shape = groups.shape if by_numbers else largest.shape
            groups += step * (2 * torch.rand(shape, generator=generator) - 1)
    return made


def assert_near(ours: torch.Tensor, exact: torch.Tensor, others: list[torch.Tensor]) -> None:
    """Within the errors of others as a mean, with their tokens where these cannot be decisive."""
    bound = sum(rms(other - exact) for other in others)
    assert rms(ours - exact) <= 1.5 * bound + 1e-5 * rms(exact)
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 4 * bound
    assert clear.any(), "no token is decided"
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


@covering(
    {
        "name": tuple(LAYOUTS),
        "architecture": DENSE,
        "fused": (True, False),
        "dtype": (torch.float32, torch.bfloat16),
    }
)
def test_a_checkpoint_answers_as_its_numbers_do(
    tmp_path: Path, name: str, architecture: str, fused: bool, dtype: torch.dtype
) -> None:
    layout = LAYOUTS[name]
    oracle = write_checkpoint(tmp_path, architecture, layout)
    exact = oracle_logits(oracle, IDS)
    model = load_paged_model(tmp_path, choose_kernels(CPU), dtype, fused=fused)
    ours = served_logits(model)
    assert (model.fused is not None) is fused
    form = layout.form if fused else str(dtype).removeprefix("torch.")
    # Inputs of one group have no other order: such matrices keep their four bits.
    both = "int4 and int8" if fused and name == "gptq-reordered" else form
    assert f"read into {both}" in model.stored_as
    assert model.quantization == (form if fused else "none")
    others = []
    if fused:
        others.append(oracle_logits(rounded(oracle, name in BY_NUMBERS), IDS))
    if dtype == torch.bfloat16:
        others.append(oracle_logits(copy.deepcopy(oracle).to(dtype), IDS))
    if others:
        assert_near(ours, exact, others)
    else:
        assert_exact(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", EXPERTS)
@pytest.mark.parametrize("name", ["fp8", "integers"])
def test_experts_of_several_files_are_decoded(
    tmp_path: Path, name: str, architecture: str, dtype: torch.dtype
) -> None:
    oracle = write_checkpoint(tmp_path, architecture, LAYOUTS[name], **EXPERTS[architecture])
    exact = oracle_logits(oracle, IDS)
    ours = served_logits(load_paged_model(tmp_path, choose_kernels(CPU), dtype))
    if dtype == torch.float32:
        assert_exact(ours, exact)
    else:
        assert_near(ours, exact, [oracle_logits(oracle.to(dtype), IDS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpt_oss_is_served_from_its_published_form(tmp_path: Path, dtype: torch.dtype) -> None:
    oracle = write_experts(tmp_path)
    exact = oracle_logits(oracle, IDS)
    model = load_paged_model(tmp_path, choose_kernels(CPU), dtype)
    ours = served_logits(model)
    assert model.stored_as.startswith("mxfp4, 4 bits in groups of 32; read into ")
    if dtype == torch.float32:
        assert_exact(ours, exact)
        return
    # Routing amplifies rounding, in transformers too: both err by a tenth.
    theirs = oracle_logits(oracle.to(dtype), IDS)
    assert rms(ours - exact) <= 1.25 * rms(theirs - exact)


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["packed", "gptq-8"])
def test_greedy_answers_are_those_of_the_numbers(
    tmp_path: Path, name: str, enforce_eager: bool
) -> None:
    oracle = write_checkpoint(tmp_path, "LlamaForCausalLM", LAYOUTS[name])
    llm = LLM(
        str(tmp_path),
        kv_memory_bytes=16 * MIB,
        dtype="float32",
        enforce_eager=enforce_eager,
    )
    try:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": IDS}], params)
        lines = " ".join(" ".join(llm.contract.lines()).split())
    finally:
        llm.close()
    ids = list(IDS)
    for _ in range(12):
        ids.append(int(oracle_logits(oracle, ids)[-1].argmax()))
    assert list(output.outputs[0].token_ids) == ids[len(IDS) :]
    form = "float32" if enforce_eager else LAYOUTS[name].form
    assert f"read into {form}" in lines


def test_a_body_with_names_of_its_own_has_its_numbers(tmp_path: Path) -> None:
    """Blocks are found by names: a pass that missed them would compute with none."""
    oracle = write_checkpoint(tmp_path, "LlamaForCausalLM", LAYOUTS["packed"])
    with torch.no_grad():
        oracle.lm_head.weight.copy_(oracle.model.embed_tokens.weight)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    body = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_quantised(tmp_path, body, LAYOUTS["packed"].fields)
    ours = served_logits(load_paged_model(tmp_path, choose_kernels(CPU)))
    assert_exact(ours, oracle_logits(oracle, IDS))


def test_a_flag_is_for_the_matrices_that_are_not_quantised(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "LlamaForCausalLM", LAYOUTS["packed"])
    kernels = choose_kernels(CPU)
    plain = load_paged_model(tmp_path, kernels)
    small = load_paged_model(tmp_path, kernels, quantization="int8")
    head_numbers = small.module.config.vocab_size * small.module.config.hidden_size
    assert small.weight_bytes < plain.weight_bytes - 2 * head_numbers
    before, after = served_logits(plain), served_logits(small)
    assert 0 < rms(after - before) < 0.02 * rms(before)


def test_scales_that_are_not_finite_are_an_error_of_the_model(tmp_path: Path) -> None:
    def broken(weight: torch.Tensor) -> Any:
        tensors, said = LAYOUTS["packed"].write(weight)
        tensors["weight_scale"][0, 0] = float("inf")
        return tensors, said

    write_checkpoint(
        tmp_path,
        "LlamaForCausalLM",
        type(LAYOUTS["packed"])(LAYOUTS["packed"].fields, broken, "int4"),
    )
    with pytest.raises(ChangeSomething, match="not finite") as caught:
        load_paged_model(tmp_path, choose_kernels(CPU))
    assert caught.value.field == "model"
