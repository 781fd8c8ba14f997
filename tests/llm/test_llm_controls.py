"""Controlled requests over a real model: transformers' own answers, whoever else is served."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from kvell.engine.sampling.grammar_process.masking import Found, MaskJob, MaskWorker, Trouble
from kvell.errors import ChangeSomething
from kvell.llm import LLM, RequestOutput
from kvell.vocabulary import KIB
from tests.llm.exactness import read_oracle
from tests.llm.teacher import (
    FORM,
    MAX_ERROR,
    SCHEMA,
    THOUGHT_FORM,
    WISHES,
    greedy_choices,
    logits_of,
    model_at,
    smollm2,
)

PROMPTS = [answer.prompt for answer in sorted(read_oracle(), key=lambda a: len(a.prompt))[2:7]]
"""8 to 19 tokens."""
CROWD = [PROMPTS[index % len(PROMPTS)] for index in range(len(WISHES))]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[RequestOutput]:
    return llm.generate(CROWD, WISHES, sequential=True)


def assert_near(one: Any, other: Any) -> None:
    """Log probabilities of one position: of one token, or by token; None before the first."""
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for token, likely in one.items():
            assert_near(likely, other[token])
    elif one is None:
        assert other is None
    else:
        assert abs(one.logprob - other.logprob) < MAX_ERROR
        assert len(getattr(one, "top", ())) == len(getattr(other, "top", ()))


def assert_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.token_ids == theirs.token_ids, f"request {theirs.index}"
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        for name in ("logprobs", "prompt_logprobs"):
            told, wanted = getattr(ours, name), getattr(theirs, name)
            assert (told is None) == (wanted is None)
            for one, other in zip(told or (), wanted or (), strict=True):
                assert_near(one, other)


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.long)])
def test_repetition_penalty_answers_like_transformers(
    shallow_path: Path, llm: LLM, count: int
) -> None:
    prompts = PROMPTS[:count]
    params = SamplingParams(temperature=0, max_tokens=8, repetition_penalty=1.3)
    outputs = llm.generate(prompts, params)
    model = model_at(shallow_path)
    for output, prompt in zip(outputs, prompts, strict=True):
        ids = torch.tensor([prompt])
        made = model.generate(ids, do_sample=False, max_new_tokens=8, repetition_penalty=1.3)
        assert output.token_ids == made[0, len(prompt) :].tolist()
    plain = llm.generate(prompts, replace(params, repetition_penalty=1.0))
    assert [o.token_ids for o in plain] != [o.token_ids for o in outputs], "it must matter"


def penalised(logits: torch.Tensor, made: list[int], params: SamplingParams) -> torch.Tensor:
    """OpenAI's formula, token by token."""
    row = logits.clone()
    for token in set(made):
        row[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
    return row


def test_presence_and_frequency_choose_by_transformers_logits(shallow_path: Path, llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [
        replace(plain, presence_penalty=presence, frequency_penalty=frequency)
        for presence, frequency in ((1.5, 0.0), (0.0, 0.8), (-0.5, 1.0))
    ]
    prompt = PROMPTS[3]
    for output, params in zip(llm.generate([prompt] * 3, asked), asked, strict=True):
        made = output.token_ids
        rows = logits_of(shallow_path, prompt + made)[len(prompt) - 1 : -1]
        expected = [int(penalised(row, made[:i], params).argmax()) for i, row in enumerate(rows)]
        assert made == expected
        assert made != [int(token) for token in rows.argmax(-1)], "it must matter"


def test_greedy_wishes_choose_by_transformers_logits(
    shallow_path: Path, alone: list[RequestOutput]
) -> None:
    checked = 0
    for output, params in zip(alone, WISHES, strict=True):
        if params.temperature == 0 and params.structured_outputs is None:
            assert output.token_ids == greedy_choices(shallow_path, output, params)
            checked += 1
    assert checked >= 4


def test_grammars_are_obeyed(llm: LLM, alone: list[RequestOutput]) -> None:
    formed = [output for output, params in zip(alone, WISHES, strict=True) if params is WISHES[3]]
    for output in formed:
        assert output.finish_reason == "stop"
        validate(json.loads(output.text), SCHEMA)
    choice = StructuredOutputs(choice=("Paris", "Rome"))
    drawn = SamplingParams(seed=1, max_tokens=8, n=8, temperature=5, structured_outputs=choice)
    [output] = llm.generate("The capital of Italy is ", drawn)
    assert {one.text for one in output.outputs} == {"Paris", "Rome"}
    assert {one.finish_reason for one in output.outputs} == {"stop"}


def test_a_grammar_begins_behind_the_reasoning(llm: LLM, alone: list[RequestOutput]) -> None:
    [place] = [i for i, one in enumerate(WISHES) if one.structured_outputs == THOUGHT_FORM]
    thought, end, answer = alone[place].text.partition(".")
    assert thought and end
    validate(json.loads(answer), SCHEMA)
    assert alone[place].finish_reason == "stop"
    free = replace(WISHES[place], structured_outputs=None)
    [plain] = llm.generate([CROWD[place]], free)
    assert plain.text.startswith(thought + end), "nothing binds the reasoning"


@pytest.mark.parametrize("ends", [("\u2603",), (".", "\u2603")])
def test_reasoning_that_never_ends_is_bounded_and_free(llm: LLM, ends: tuple[str, ...]) -> None:
    asked = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    endless = replace(asked, structured_outputs=replace(FORM, reasoning=Reasoning(ends)))
    plain, thought = llm.generate([PROMPTS[2]] * 2, [asked, endless])
    assert thought.token_ids == plain.token_ids
    assert thought.finish_reason == "length"


def test_a_stop_token_ends_an_answer_that_still_reasons(llm: LLM) -> None:
    reasoning = Reasoning(("\u2603",))
    plain = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    [longer] = llm.generate([PROMPTS[2]], plain)
    stop = longer.token_ids[3]
    asked = replace(
        plain, stop_token_ids=(stop,), structured_outputs=replace(FORM, reasoning=reasoning)
    )
    [output] = llm.generate([PROMPTS[2]], asked)
    assert output.finish_reason == "stop"
    assert output.token_ids == longer.token_ids[: longer.token_ids.index(stop) + 1]


def test_min_p_drops_what_is_unlikely(shallow_path: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=3, seed=9, max_tokens=16, min_p=0.3, ignore_eos=True)
    first, again = (llm.generate([PROMPTS[2]], params)[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    known = len(PROMPTS[2])
    [free] = llm.generate([PROMPTS[2]], replace(params, min_p=0.0))

    def least(output: RequestOutput) -> float:
        logits = logits_of(shallow_path, PROMPTS[2] + output.token_ids)[known - 1 : -1] / 3
        shares = (logits - logits.max(-1, keepdim=True).values).exp()
        return min(float(row[token]) for row, token in zip(shares, output.token_ids, strict=True))

    assert least(first) >= 0.3 - MAX_ERROR
    assert least(free) < 0.3, "it must matter"
    assert len(set(first.token_ids)) > 1


def test_a_mixed_batch_answers_like_each_alone(llm: LLM, alone: list[RequestOutput]) -> None:
    assert_same(llm.generate(CROWD, WISHES), alone)
    assert llm.stats()["max_running"] > 1


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
        pytest.param({"async_scheduling": True}, marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 24}, marks=pytest.mark.long),
        pytest.param({"enable_chunked_prefill": False}, marks=pytest.mark.long),
    ],
    ids=["draft tokens", "ahead", "chunks", "whole prompts"],
)
def test_options_change_no_answer(
    shallow_path: Path, alone: list[RequestOutput], options: dict[str, Any]
) -> None:
    llm = smollm2(shallow_path, **options)
    assert llm.engine.core.limits.depth == int("async_scheduling" in options)
    assert llm.engine.core.limits.enable_chunked_prefill == (
        "enable_chunked_prefill" not in options
    )
    assert_same(llm.generate(CROWD, WISHES), alone)
    stats = llm.engine.core.stats()
    assert ("num_speculative_tokens" in options) == (stats.spec_decode_accepted_tokens > 0)


@pytest.mark.long
def test_preempted_ones_go_on_as_if_nothing_had_happened(
    shallow_path: Path, alone: list[RequestOutput]
) -> None:
    llm = smollm2(shallow_path, kv_memory_bytes=512 * KIB, max_model_len=64)
    outputs = llm.generate(CROWD, WISHES)
    assert sum(output.preemptions for output in outputs) > 0
    assert_same(outputs, alone)


def test_a_grammar_that_gets_too_complex_ends_its_answer_only(
    llm: LLM, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = MaskWorker.masks

    def failing(
        worker: MaskWorker, jobs: Sequence[MaskJob], forget: Iterable[int]
    ) -> Iterator[tuple[MaskJob, Found | Trouble]]:
        for job, found in masks(worker, jobs, forget):
            fails = job.asked == FORM and job.length >= 3
            yield job, "unavailable" if fails else found

    monkeypatch.setattr(MaskWorker, "masks", failing)
    outputs = llm.generate(CROWD, WISHES)
    assert outputs[3].finish_reason == "error"
    assert outputs[3].token_ids == alone[3].token_ids[:3]
    del outputs[3]
    assert_same(outputs, alone[:3] + alone[4:])


def test_bad_words_do_not_come(smollm2_path: Path) -> None:
    """With a space before them and without; also those of several tokens."""
    llm = smollm2(smollm2_path)
    asked = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = "The capital of France is Paris. The capital of France is"
    [free] = llm.generate(prompt, asked)
    words = free.text.split()[:3]
    assert len(words) == 3
    [output] = llm.generate(prompt, replace(asked, bad_words=tuple(words)))
    for word in words:
        spelled = [
            llm.tokenizer.encode(form, add_special_tokens=False) for form in (word, f" {word}")
        ]
        for ids in spelled:
            assert not holds(output.token_ids, ids.tolist())
    assert any(holds(free.token_ids, [t]) for t in output.token_ids), "nothing else is hidden"


def holds(tokens: list[int], run: list[int]) -> bool:
    return any(tokens[at : at + len(run)] == run for at in range(len(tokens)))


def test_an_answer_that_may_go_on_with_nothing_ends_with_an_error(llm: LLM) -> None:
    nothing = SamplingParams(max_tokens=4, allowed_token_ids=(28,), bad_words_token_ids=((28,),))
    plain = SamplingParams(temperature=0, max_tokens=4)
    bad, good = llm.generate([PROMPTS[0]] * 2, [nothing, plain])
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert "allowed_token_ids, bad_words and the answer's grammar exclude all" in bad.error
    assert good.finish_reason in ("length", "stop") and good.token_ids


def test_what_ended_an_answer_is_told(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [free] = llm.generate([PROMPTS[2]], plain)
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    stop, token = free.text[3:6], free.token_ids[4]
    told = llm.generate(
        [PROMPTS[2]] * 4,
        [
            replace(plain, stop=(stop,)),
            replace(plain, stop=(stop,), include_stop_str_in_output=True),
            replace(plain, stop_token_ids=(token,)),
            replace(plain, stop_token_ids=(token,), include_stop_str_in_output=True),
        ],
    )
    assert [output.finish_reason for output in told] == ["stop"] * 4
    assert [output.stop_reason for output in told] == [stop, stop, token, token]
    before = free.text.index(stop)
    assert [output.text for output in told[:2]] == [free.text[:before], free.text[: before + 3]]
    known = free.token_ids.index(token)
    assert told[2].token_ids == told[3].token_ids == free.token_ids[: known + 1]
    decode = llm.tokenizer.decode
    assert told[2].text == decode(free.token_ids[:known])
    assert told[3].text == decode(free.token_ids[: known + 1])


def test_special_tokens_are_shown_to_who_asks(llm: LLM) -> None:
    [end] = llm.tokenizer.encode("<|im_end|>", add_special_tokens=False).tolist()
    forced = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=(end,), ignore_eos=True)
    hidden, shown = llm.generate(
        [PROMPTS[0]] * 2, [forced, replace(forced, skip_special_tokens=False)]
    )
    assert (hidden.text, shown.text) == ("", "<|im_end|><|im_end|>")


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    messages = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "My favourite colour is"},
    ]
    asked = SamplingParams(temperature=0, max_tokens=2)
    [output] = llm.chat(messages, asked, add_generation_prompt=False, continue_final_message=True)
    prompt = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nMy favourite colour is")
    with pytest.raises(ChangeSomething, match="continue_final_message=True: conflicts with"):
        llm.chat(messages, asked, continue_final_message=True)


def test_what_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with pytest.raises(ChangeSomething, match=r"structured_outputs\.regex=…: cannot be followed"):
        llm.generate([PROMPTS[0]] * 2, [SamplingParams(), bad])
    with pytest.raises(ChangeSomething, match="logit_bias=49152: is not a token of this model"):
        llm.generate([PROMPTS[0]], SamplingParams(logit_bias={49152: 1.0}))
    with pytest.raises(ChangeSomething, match="allowed_token_ids=49152: is not a token of this"):
        llm.generate([PROMPTS[0]], SamplingParams(allowed_token_ids=(5, 49152)))
    assert not llm.engine.has_work()
