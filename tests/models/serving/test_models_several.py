"""Independent models in one engine: every answer is what the model says when it is alone."""

import pytest

from kvell.memory import Manager, pool_bytes_for
from kvell.vocabulary import MIB
from tests.models.cases import covering, long_unless, some_fast
from tests.models.harness import prompt_ids
from tests.models.served import Served, layout_of
from tests.models.served_together import Together, assert_all

PAIRS = (
    ("LlamaForCausalLM", "Gemma3ForCausalLM"),
    ("Qwen3NextForCausalLM", "MinistralForCausalLM"),
    ("FalconH1ForCausalLM", "JambaForCausalLM"),
    ("DeepseekV3ForCausalLM", "Llama4ForCausalLM"),
    ("Mamba2ForCausalLM", "GptOssForCausalLM"),
)
FAST = PAIRS[:2]
MARKED = [pytest.param(pair, id="+".join(pair), marks=long_unless(pair in FAST)) for pair in PAIRS]
every_pair = pytest.mark.parametrize("pair", MARKED)
LENGTHS = (3, 90, 1, 64, 131, 33)


@covering({"pair": MARKED, "batched": [256, 29]}, together=1)
def test_both_models_answer_in_the_same_steps(pair: tuple[str, str], batched: int) -> None:
    together = Together(*pair, batched=batched)
    for index, length in enumerate(LENGTHS):
        together.submit(f"q{length}", f"m{index % 2}", prompt_ids(length), outputs=12)
    together.run()
    assert together.mixed_steps() > 3
    assert_all(together)


@every_pair
def test_tokens_are_those_of_an_engine_alone(pair: tuple[str, str]) -> None:
    together = Together(*pair)
    for length in LENGTHS:
        for model in ("m0", "m1"):
            together.submit(f"{model}-{length}", model, prompt_ids(length))
    together.run()
    for model, architecture in together.architectures.items():
        alone = Served(architecture)
        for length in LENGTHS:
            alone.submit(f"{model}-{length}", prompt_ids(length))
        alone.run()
        outputs = {name: answer.output for name, answer in alone.answers.items()}
        assert together.outputs(model) == outputs


@pytest.mark.parametrize("pair", some_fast(PAIRS, PAIRS[:1]))
def test_requests_of_either_model_give_way_to_the_other(pair: tuple[str, str]) -> None:
    """Whoever came last is preempted, whichever model it asked; and both resume exactly."""
    need_bytes = max(pool_bytes_for(layout_of(name), 96, 64) for name in pair)
    preemptions = {"m0": 0, "m1": 0}
    for kv_bytes in (need_bytes * 3 // 2, need_bytes * 2):
        together = Together(*pair, kv_bytes=kv_bytes, max_model_len=96)
        for index in range(12):
            prompt = prompt_ids(20 + index, seed=index)
            together.submit(f"q{index}", f"m{index // 2 % 2}", prompt, outputs=40)
        together.run()
        assert_all(together)
        for model in preemptions:
            preemptions[model] += together.preemptions(model)
    assert sum(preemptions.values()) > 0
    assert all(preemptions.values()) or pair != PAIRS[0]


@every_pair
def test_a_prefix_is_hit_by_its_own_model_only(pair: tuple[str, str]) -> None:
    """The second request of each model hits what the first one of an engine alone would."""
    together, shared = Together(*pair), prompt_ids(100)
    hits: dict[str, list[int]] = {"m0": [], "m1": []}
    for turn in range(3):
        for model, found in hits.items():
            prompt = shared + prompt_ids(40, seed=turn)
            found.append(together.ask(f"{model}-{turn}", model, prompt).cached_tokens)
    for model, architecture in together.architectures.items():
        alone = Served(architecture)
        prompts = [shared + prompt_ids(40, seed=turn) for turn in range(3)]
        assert hits[model] == [alone.ask(f"q{i}", p).cached_tokens for i, p in enumerate(prompts)]
        assert hits[model][0] == 0
        assert hits[model][1] >= 64
    assert_all(together)


@every_pair
def test_a_damaged_page_of_one_model_changes_its_answers_alone(pair: tuple[str, str]) -> None:
    """This test sees that the others could fail."""
    together, shared = Together(*pair), prompt_ids(64)
    for model in ("m0", "m1"):
        together.ask(f"{model}-first", model, shared + prompt_ids(20))
    for entry in together.engine.core.memory.snapshot().index:
        group = together.layout.groups[entry.group]
        if group.model == "m1":
            start = entry.page * group.page_stride_bytes
            page = together.recorders["m1"].pool[start : start + group.page_stride_bytes]
            page.copy_(page.roll(64))
    assert_all(together)
    for model in ("m0", "m1"):
        answer = together.ask(f"{model}-again", model, shared + prompt_ids(20, seed=1))
        assert answer.cached_tokens >= 64
    with pytest.raises(AssertionError):
        assert_all(together)
    del together.answers["m1-again"]
    assert_all(together)


@every_pair
def test_a_cancelled_neighbour_and_another_order(pair: tuple[str, str]) -> None:
    outputs = []
    for order in (1, -1):
        together = Together(*pair, batched=40)
        for name, model in [("left", "m0"), ("gone", "m1"), ("right", "m1")][::order]:
            together.submit(name, model, prompt_ids(60, seed=len(name)), outputs=16)
        for _ in range(6):
            together.step()
        together.cancel("gone")
        together.submit("after", "m0", prompt_ids(50, seed=9))
        together.run()
        del together.answers["gone"]
        assert_all(together)
        outputs.append({name: answer.output for name, answer in together.answers.items()})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    "manager", some_fast(["jenga", "paged", "max-page", "static", "manual"], ["jenga", "manual"])
)
def test_every_manager_serves_two_models(manager: Manager) -> None:
    together = Together(*PAIRS[0], manager=manager)
    for index, length in enumerate(LENGTHS):
        together.submit(f"q{length}", f"m{index % 2}", prompt_ids(length))
    together.run()
    assert_all(together)


def test_three_models_and_one_without_a_name() -> None:
    together = Together("LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3NextForCausalLM")
    for model in ("", "m1", "m2"):
        together.submit(f"to {model}", model, prompt_ids(70), outputs=12)
    together.run()
    assert together.mixed_steps() > 0
    assert_all(together)


@pytest.mark.parametrize("pair", some_fast(PAIRS[:2], PAIRS[1:2]))
def test_draft_tokens_beside_another_model(pair: tuple[str, str]) -> None:
    """Looked up in the text; a model without states does not repeat those that are right."""
    outputs = []
    for draft_tokens in (0, 4):
        together = Together(*pair, draft_tokens=draft_tokens)
        for index in range(4):
            prompt = prompt_ids(12, seed=index) * 4
            together.submit(f"q{index}", f"m{index % 2}", prompt, outputs=24)
        together.run()
        outputs.append({name: answer.output for name, answer in together.answers.items()})
    assert outputs[0] == outputs[1]
    assert together.engine.core.stats().spec_decode_draft_tokens > 0


def test_memory_goes_where_the_load_is() -> None:
    """Load moves from one model to the other and back; a pool cut at start cannot follow."""
    peaks = {}
    for manager in ("kvell", "manual"):
        together = Together(*PAIRS[0], kv_bytes=1 * MIB, manager=manager)
        peaks[manager] = [wave(together, turn, f"m{turn % 2}") for turn in range(3)]
        assert_all(together)
    for shared, cut in zip(peaks["kvell"], peaks["manual"], strict=True):
        assert shared[0] > 0.75, "nearly all of the pool is the busy model's"
        assert shared[1] >= 1.5 * cut[1], "and so more of its requests run at once"


def wave(together: Together, turn: int, model: str) -> tuple[float, int]:
    """Many requests to one model: the largest share of the pool it used, and its largest batch."""
    for index in range(16):
        prompt = prompt_ids(60 + index, seed=100 * turn + index)
        together.submit(f"{turn}-{index}", model, prompt, outputs=12)
    share, batch = 0.0, 0
    while together.engine.has_work():
        together.step()
        share = max(share, together.used_bytes()[model] / together.layout.pool_bytes)
        batch = max(batch, len(together.engine.core.running))
    return share, batch
