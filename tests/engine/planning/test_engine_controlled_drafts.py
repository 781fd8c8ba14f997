"""Draft tokens of requests with penalties, biases, lists, budgets, logprobs: no token changes."""

from dataclasses import replace
from typing import Any

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import ReasoningBudget
from tests.engine.speculating import (
    GREEDY,
    SEEDED,
    Served,
    blurred,
    prompts,
    served,
    words_module,
)
from tests.models.cases import covering

MAX_ERROR = 1e-4
LLAMA, JAMBA = "LlamaForCausalLM", "JambaForCausalLM"
CONTROLS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.05},
    "strong repetition": {"repetition_penalty": 2.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {4: 3.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": (3, 4, 5)},
    "bad words": {"bad_words_token_ids": ((4,), (5, 6), (7, 8, 9))},
    "allowed": {"allowed_token_ids": (3, 4, 7, 9, 11)},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "budget": {"reasoning_budget": ReasoningBudget(9, 4)},
    "all": {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "logit_bias": {4: 1.0},
        "min_tokens": 5,
        "bad_words_token_ids": ((5, 6),),
        "reasoning_budget": ReasoningBudget(12, 6),
        "logprobs": 2,
    },
}
DRAFTS = ("", "blurred")
EACH = 3
"""Requests of each kind."""


def answers(run: Served, sampling: SamplingParams) -> Served:
    """Answer requests of all kinds at once, which share steps."""
    texts = list(prompts(EACH * len(CONTROLS)).values())
    wishes = [(name, asked) for name, asked in CONTROLS.items() for _ in range(EACH)]
    run.ask_each(
        {
            f"{name}-{index}": (text, replace(sampling, **asked))
            for index, (text, (name, asked)) in enumerate(zip(texts, wishes, strict=True))
        }
    )
    return run


def drafting(architecture: str, draft: str) -> Served:
    module = words_module(architecture)
    return served(module, 4, blurred(module, 0.05) if draft else None)


def assert_drafted(run: Served, kind: str) -> None:
    """Requests of a kind have draft tokens, of which some are right."""
    works = [work for plan in run.plans for work in plan.work if work.samples]
    own = [work for work in works if work.request_id.rpartition("-")[0] == kind]
    made = sum(len(out) for name, out in run.outputs.items() if name.rpartition("-")[0] == kind)
    drafted, accepted = sum(work.proposed for work in own), made - len(own)
    assert 0 < accepted <= drafted, kind


def assert_same(run: Served, alone: Served) -> None:
    assert run.outputs == alone.outputs
    assert {name: end.reason for name, end in run.ended.items()} == {
        name: end.reason for name, end in alone.ended.items()
    }
    for name, expected in alone.logprobs.items():
        assert len(run.logprobs[name]) == len(expected)
        for one, other in zip(run.logprobs[name], expected, strict=True):
            assert abs(one.logprob - other.logprob) < MAX_ERROR
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@covering(
    {"sampling": ["greedy", "drawn"], "draft": DRAFTS, "architecture": (LLAMA, JAMBA)}, together=1
)
def test_no_token_changes(sampling: str, draft: str, architecture: str) -> None:
    params = {"greedy": GREEDY, "drawn": SEEDED}[sampling]
    alone = answers(served(words_module(architecture)), params)
    run = answers(drafting(architecture, draft), params)
    assert_same(run, alone)
    for kind, asked in CONTROLS.items():
        assert_drafted(run, kind)
        if "logprobs" in asked:
            assert all(
                len(run.logprobs[name]) == len(out)
                for name, out in run.outputs.items()
                if name.rpartition("-")[0] == kind
            )


def test_a_draft_model_draws_under_the_requests_controls() -> None:
    """The model as its own draft is always right, also where penalties change what is likely."""
    params = replace(
        GREEDY,
        repetition_penalty=1.5,
        bad_words_token_ids=((4,), (5, 6)),
        reasoning_budget=ReasoningBudget(8, 7),
    )
    module = words_module(LLAMA)
    run, alone, free = served(module, 3, module), served(module), served(module)
    run.ask(prompts(3), params)
    alone.ask(prompts(3), params)
    free.ask(prompts(3), GREEDY)
    assert run.outputs == alone.outputs
    assert run.outputs != free.outputs, "they must matter"
    assert run.stats.spec_decode_accepted_tokens == run.stats.spec_decode_draft_tokens > 0


def test_a_token_that_a_budget_forces_is_drafted() -> None:
    """It is where the text does not have it, and the tokens before it are looked up."""
    params = replace(GREEDY, reasoning_budget=ReasoningBudget(10, 1), logit_bias={1: -100.0})
    module = words_module(LLAMA)
    run, alone = served(module, 4), served(module)
    for one in (run, alone):
        one.ask(prompts(8), params)
    assert run.outputs == alone.outputs
    assert all(output.index(1) == 10 for output in run.outputs.values())
    works = [work for plan in run.plans for work in plan.work if work.output_index <= 10]
    forced = [work for work in works if 1 in work.draft_tokens.tolist()]
    assert forced
    assert all(w.output_index + w.draft_tokens.tolist().index(1) == 10 for w in forced)
