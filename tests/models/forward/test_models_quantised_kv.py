"""Keys and values in eight bits: against transformers reading what the pages would give back."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from kvell.attention.choice import choose_kernels
from kvell.attention.portable import PortableKernels
from kvell.attention.quantised import dequantise, is_quantised, quantise
from kvell.errors import ChangeSomething
from kvell.memory import plan_layout, pool_bytes_for
from kvell.models.config.kv_dtypes import KV_DTYPES, kv_dtype_named
from kvell.models.loading.loading import describe_as
from kvell.models.paged_model import PagedModel
from kvell.models.text.tokenizer import Tokenizer
from kvell.pages.layout import GroupKind
from kvell.vocabulary import MIB
from tests.models.cases import covering, some_fast
from tests.models.harness import PagedRunner, oracle_logits, prompt_ids, runner_over, tiny_module
from tests.models.served import Served, oracle_rows


def rounded(vectors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not is_quantised(dtype):
        return vectors.to(dtype).to(vectors.dtype)
    return dequantise(quantise(vectors, dtype), dtype).to(vectors.dtype)


def quantising(module: Any, dtype: torch.dtype) -> Any:
    """A copy whose eager attention reads rounded keys and values (latents, where it has them)."""
    copied = copy.deepcopy(module)
    name = f"quantising-{dtype}"
    AttentionInterface.register(name, _attention(dtype))
    AttentionMaskInterface.register(name, eager_mask)
    copied.set_attn_implementation(name)
    for child in copied.modules():
        if hasattr(child, "expand_kv"):
            child.expand_kv = _expanding(child.expand_kv, dtype)
    return copied


def _attention(dtype: torch.dtype) -> Any:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **rest: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        if not hasattr(module, "expand_kv"):
            key, value = rounded(key, dtype), rounded(value, dtype)
        return eager(module, query, key, value, mask, **rest)

    return attention


def _expanding(expand: Any, dtype: torch.dtype) -> Any:
    def expand_rounded(latent: torch.Tensor, rotary: torch.Tensor) -> Any:
        whole = rounded(torch.cat((latent, rotary), -1), dtype)
        size = latent.shape[-1]
        return expand(whole[..., :size], whole[..., size:])

    return expand_rounded


PROMPTS = Path(__file__).parents[2] / "data" / "smollm2_prompts.jsonl"
INT8, FP8 = torch.int8, torch.float8_e4m3fn
ARCHITECTURES = (
    "LlamaForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Gemma3nForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
)
"""Full, sliding, sinks, chunked, shared, latent, and attention beside a state."""

FAST = ("LlamaForCausalLM", "Gemma3nForCausalLM", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM")
FAMILIES = some_fast(ARCHITECTURES, FAST)
KERNELS = [pytest.param(False, id="portable"), pytest.param(True, id="native")]
STORED = [pytest.param(INT8, id="int8"), pytest.param(FP8, id="fp8")]
every_dtype = pytest.mark.parametrize("kv_dtype", STORED)


def runner(
    module: Any, kv_dtype: torch.dtype, native: bool = False, large_pages: int = 20
) -> PagedRunner:
    description = describe_as(module.config, module.dtype, kv_dtype)
    kernels = choose_kernels(torch.device("cpu")) if native else PortableKernels()
    model = PagedModel(copy.deepcopy(module), description, kernels, kv_dtype)
    return runner_over(model, large_pages=large_pages)


def rms(difference: torch.Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


def exact_rows(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of rows within what exact means for float32."""
    bound = 1e-4 * float(expected.abs().max())
    return float(((actual - expected).abs().amax(1) <= bound).float().mean())


def assert_rounded_alike(actual: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor) -> None:
    """Exact, but for rows that read a number so near the middle of two steps of rounding that
    it fell on the other side; where nothing is rounded (``plain``) hardly a row is.
    """
    assert actual.isfinite().all()
    few_differ = exact_rows(actual, expected) >= 0.5
    # One such number early in a prefix that all rows read moves all of them, but not far.
    assert few_differ or rms(actual - expected) <= 0.05 * rms(plain - expected)
    assert exact_rows(plain, expected) <= 0.1


@covering({"architecture": FAMILIES, "kv_dtype": STORED, "native": KERNELS})
def test_prefill_in_chunks_beside_another(
    architecture: str, kv_dtype: torch.dtype, native: bool
) -> None:
    module = tiny_module(architecture)
    ids, other = prompt_ids(40), prompt_ids(23, seed=1)
    over = runner(module, kv_dtype, native)
    over.step([("b", other)])
    parts = [over.step([("a", ids[i : i + 7]), ("b", [5])])[:-1] for i in range(0, 40, 7)]
    expected = oracle_logits(quantising(module, kv_dtype), ids)
    assert_rounded_alike(torch.cat(parts), expected, oracle_logits(module, ids))


@covering({"architecture": FAMILIES, "kv_dtype": STORED}, together=1)
def test_served_with_prefix_hits(architecture: str, kv_dtype: torch.dtype) -> None:
    """Through the engine: ragged batches over shared prefixes, their tail pages copied."""
    served, shared = Served(architecture, kv_dtype=kv_dtype, batched=50), prompt_ids(100)
    served.ask("first", shared + prompt_ids(20))
    for index in range(3):
        served.submit(f"q{index}", shared + prompt_ids(5 + index, seed=index), outputs=10)
    served.run()
    assert all(served.answers[f"q{index}"].cached_tokens >= 64 for index in range(3))
    oracle = quantising(tiny_module(architecture), kv_dtype)
    actual, expected, plain = [], [], []
    for answer in served.answers.values():
        ids = answer.prompt + answer.output
        actual += answer.logits
        expected.append(oracle_logits(oracle, ids)[len(answer.prompt) - 1 : -1])
        plain.append(oracle_rows(architecture, answer))
    assert_rounded_alike(torch.stack(actual), torch.cat(expected), torch.cat(plain))


@every_dtype
def test_preempted_requests_resume_with_the_same_rounding(kv_dtype: torch.dtype) -> None:
    name = "LlamaForCausalLM"
    layers = describe_as(tiny_module(name).config, torch.float32, kv_dtype).layers
    need_bytes = pool_bytes_for(plan_layout(layers, MIB), 96, 64)
    served = Served(name, need_bytes * 3 // 2, max_model_len=96, kv_dtype=kv_dtype)
    for index in range(6):
        served.submit(f"q{index}", prompt_ids(20 + index, seed=index), outputs=40)
    served.run()
    assert sum(a.finished.preemptions for a in served.answers.values() if a.finished) > 0
    oracle = quantising(tiny_module(name), kv_dtype)
    for answer in served.answers.values():
        expected = oracle_logits(oracle, answer.prompt + answer.output)[len(answer.prompt) - 1 : -1]
        assert_rounded_alike(torch.stack(answer.logits), expected, oracle_rows(name, answer))


@covering(
    {"kv_dtype": STORED, "architecture": ["LlamaForCausalLM", "Gemma3ForCausalLM"]}, together=1
)
def test_bfloat16_models_err_no_more_than_transformers(
    architecture: str, kv_dtype: torch.dtype
) -> None:
    """Both in bfloat16 over rounded keys and values, against float32 over the same weights."""
    half = copy.deepcopy(tiny_module(architecture)).bfloat16()
    half.set_attn_implementation("eager")
    ids = prompt_ids(60)
    exact = oracle_logits(quantising(copy.deepcopy(half).float(), kv_dtype), ids)
    theirs = rms(oracle_logits(quantising(half, kv_dtype), ids) - exact)
    for native in (False, True):
        ours = rms(runner(half, kv_dtype, native).step([("a", ids)]) - exact)
        assert 0 < ours <= 1.25 * theirs


@pytest.fixture(scope="module")
def real_text(smollm2_tokenizer: Tokenizer) -> list[int]:
    """400 tokens of plain prompts: of 200, a few in one chunk of them decide the comparison."""
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    ids: list[int] = smollm2_tokenizer.encode(" ".join(prompts)).tolist()
    return ids[:400]


@pytest.mark.long
@every_dtype
def test_real_weights_err_no_more_than_transformers(
    smollm2_path: Path, real_text: list[int], kv_dtype: torch.dtype
) -> None:
    """bfloat16 SmolLM2, against float32 over the same weights and rounded keys and values."""
    half = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval()
    half.set_attn_implementation("eager")
    full = copy.deepcopy(half).float()
    exact = oracle_logits(quantising(full, kv_dtype), real_text)
    theirs = rms(oracle_logits(quantising(half, kv_dtype), real_text) - exact)
    over = runner(half, kv_dtype, native=True, large_pages=40)
    ours = rms(
        torch.cat([over.step([("a", real_text[:50])]), over.step([("a", real_text[50:])])]) - exact
    )
    assert 0 < ours <= 1.25 * theirs
    plain = oracle_logits(full, real_text)
    agree = float((exact.argmax(1) == plain.argmax(1)).float().mean())
    assert agree > (0.9 if kv_dtype == INT8 else 0.75), "eight bits must be worth having"


@every_dtype
def test_a_token_stores_a_quarter_and_its_scales(kv_dtype: torch.dtype) -> None:
    config = tiny_module("LlamaForCausalLM").config
    layer = describe_as(config, torch.float32, kv_dtype).layers[0]
    assert layer.token_bytes == 2 * 2 * (16 + 4)
    assert describe_as(config, torch.float32, torch.float32).layers[0].token_bytes == 2 * 2 * 64


@every_dtype
def test_latents_are_quantised_as_one_vector(kv_dtype: torch.dtype) -> None:
    config = tiny_module("DeepseekV3ForCausalLM").config
    assert describe_as(config, torch.float32, kv_dtype).layers[0].token_bytes == 24 + 8 + 4


def test_states_are_not_quantised() -> None:
    config = tiny_module("FalconH1ForCausalLM").config
    plain, small = (describe_as(config, torch.float32, dtype) for dtype in (torch.float32, INT8))
    states = [
        [layer.state_bytes for layer in d.layers if layer.kind is GroupKind.STATE]
        for d in (plain, small)
    ]
    assert states[0] == states[1] != []


def test_names_of_the_flag() -> None:
    assert kv_dtype_named("auto", "auto") == kv_dtype_named("auto", "bfloat16") == "bfloat16"
    assert kv_dtype_named("auto", "float32") == "float32"
    assert [kv_dtype_named(name, "bfloat16") for name in KV_DTYPES] == list(KV_DTYPES)
    with pytest.raises(ChangeSomething, match="--kv-cache-dtype"):
        kv_dtype_named("fp4", "auto")


def test_names_mean_what_the_sizes_say() -> None:
    from kvell.attention.quantised import scale_bytes_of
    from kvell.engine.assembly import STORED

    assert STORED.keys() == KV_DTYPES.keys()
    for name, stored in KV_DTYPES.items():
        assert stored.element_bytes == STORED[name].itemsize
        assert stored.scale_bytes == scale_bytes_of(STORED[name])
