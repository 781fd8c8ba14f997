"""Every kind of family served by the whole engine: the situations that all of them meet."""

import pytest

from kvell.memory import pool_bytes_for
from tests.models.attention_variants import VARIANTS
from tests.models.cases import covering, families, some_fast
from tests.models.harness import STATES, prompt_ids
from tests.models.served import Served, assert_all, has_attention, layout_of

PLAIN = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "Qwen3ForCausalLM",
)
NAMES = sorted({*PLAIN, *VARIANTS, *STATES})
FAMILIES = families(NAMES)
FEW = (
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma3ForCausalLM",
    "Llama4ForCausalLM",
    "MambaForCausalLM",
    "Qwen3NextForCausalLM",
)
"""For what takes most of the time: kinds of memory, not of arithmetic."""
every_family = pytest.mark.parametrize("architecture", FAMILIES)


@every_family
def test_one_request_at_a_time(architecture: str) -> None:
    served = Served(architecture)
    for length in (150, 31, 64):
        served.ask(f"q{length}", prompt_ids(length))
    assert_all(served)


@covering({"architecture": FAMILIES, "batched": [256, 23]}, together=1)
def test_ragged_batches_and_prefill_in_chunks(architecture: str, batched: int) -> None:
    served = Served(architecture, batched=batched)
    for length in (3, 90, 1, 64, 131):
        served.submit(f"q{length}", prompt_ids(length), outputs=12)
    served.run()
    assert_all(served)


@covering({"architecture": some_fast(NAMES, FEW), "quarters": [6, 5]}, together=1)
def test_requests_that_are_preempted_and_resume(architecture: str, quarters: int) -> None:
    """Pools for one long request and a part of another: growth runs out of pages.

    States alone do not grow: who was admitted stays.

    :param quarters: of the memory of one request.
    """
    kv_bytes = pool_bytes_for(layout_of(architecture), 96, 64) * quarters // 4
    served = Served(architecture, kv_bytes, max_model_len=96)
    for index in range(12):
        served.submit(f"q{index}", prompt_ids(20 + index, seed=index), outputs=40)
    served.run()
    assert_all(served)
    preemptions = sum(a.finished.preemptions for a in served.answers.values() if a.finished)
    assert (preemptions > 0) == has_attention(architecture)


@every_family
def test_a_neighbour_that_is_cancelled(architecture: str) -> None:
    served = Served(architecture, batched=40)
    prompts = {name: prompt_ids(60, seed=i) for i, name in enumerate(("left", "gone", "right"))}
    for name, prompt in prompts.items():
        served.submit(name, prompt, outputs=16)
    for _ in range(6):
        served.step()
    served.cancel("gone")
    served.submit("after", prompt_ids(50, seed=9))
    served.run()
    gone = served.answers["gone"].finished
    assert gone is not None
    assert gone.reason == "cancelled"
    assert len(served.answers["left"].output) == 16
    assert_all(served)


@pytest.mark.parametrize("architecture", some_fast(NAMES, FEW))
def test_order_of_execution_changes_no_answer(architecture: str) -> None:
    prompts = {f"q{length}": prompt_ids(length) for length in (17, 70, 33, 100)}
    outputs = []
    for order in (list(prompts), list(prompts)[::-1]):
        served = Served(architecture, batched=64)
        for name in order:
            served.submit(name, prompts[name])
        served.run()
        assert_all(served)
        outputs.append({name: answer.output for name, answer in served.answers.items()})
    assert outputs[0] == outputs[1]
