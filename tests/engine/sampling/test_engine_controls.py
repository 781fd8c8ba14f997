"""Controls of a step: whatever else is in the batch, each row is treated as if it were alone."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import ReasoningBudget, StructuredOutputs
from kvell.engine.requests.plan import NO_TOKEN, StepPlan, TokenWork, verify
from kvell.engine.running.model_part import rows_of
from kvell.engine.sampling.controls import Controls, SampledPart, adjust, token_logprobs
from kvell.engine.sampling.draw import sample
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.vocabulary import RequestId, StepNumber
from tests.engine.works import work_of

WORDS = 40
ENDS = (3, 4)
GRAMMAR = StructuredOutputs(regex="a*")
DRAWN: Any = {"temperature": 0.9, "seed": 5}


@dataclass
class FixedGrammars(Grammars):
    """Allows what it is told to, by handle; notes what it was asked.

    :ivar after: what is allowed after draft tokens, as far as that is known in time.
    """

    allows: Mapping[int, Sequence[int] | None]
    after: Mapping[int, Sequence[Sequence[int] | None]] = field(default_factory=dict)
    wanted: list[MaskedRequest] = field(default_factory=list)

    def masks(self, wanted: Sequence[MaskedRequest]) -> Future[dict[RequestId, Allowed | None]]:
        self.wanted.extend(wanted)
        names = {one.request_id for one in wanted}
        found: Future[dict[RequestId, Allowed | None]] = Future()
        allows = {RequestId(f"r{handle}"): tokens for handle, tokens in self.allows.items()}
        found.set_result({name: _mask(allows[name]) for name in names & allows.keys()})
        return found

    def draft_masks(
        self, wanted: Sequence[MaskedRequest]
    ) -> dict[RequestId, tuple[Allowed | None, ...]]:
        after = {RequestId(f"r{handle}"): masks for handle, masks in self.after.items()}
        names = {one.request_id for one in wanted}
        return {name: tuple(map(_mask, after[name])) for name in names & after.keys()}


def _mask(tokens: Sequence[int] | None) -> Allowed | None:
    return None if tokens is None else np.isin(np.arange(WORDS), tokens)


def make_work(
    handle: int,
    sampling: SamplingParams | None,
    prompt: Sequence[int] = (7, 8, 9),
    output: Sequence[int] = (),
    *,
    start: int | None = None,
    count: int = 1,
    proposed: int = 0,
    scores: int | None = None,
) -> TokenWork:
    """Work up to the last known token, or, for ``sampling`` None, from ``start`` on."""
    known = np.array([*prompt, *output], np.int32)
    start = len(known) - count + proposed if start is None else start
    plain = (sampling is None or sampling.is_plain) and scores is None
    return work_of(
        f"r{handle}",
        handle,
        start,
        count,
        sampling=sampling,
        output_index=len(output),
        proposed=proposed,
        prompt_tokens=len(prompt),
        past=None if plain else known,
        scores=scores,
    )


PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
PENALTIES = SamplingParams(
    presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=3.0, logprobs=0, **DRAWN
)
ALL_LOGPROBS = SamplingParams(prompt_logprobs=1, logprobs=1, **DRAWN)
MIXED = [
    make_work(1, SamplingParams(temperature=0)),
    make_work(2, SamplingParams(**DRAWN), output=[1, 2], count=3, proposed=2),
    make_work(3, None, PROMPT, start=0, count=4),
    make_work(4, SamplingParams(temperature=0, logprobs=3), output=[1]),
    make_work(5, None, PROMPT, start=0, count=4, scores=2),
    make_work(6, PENALTIES, output=[1, 1, 2, 30]),
    make_work(7, SamplingParams(prompt_logprobs=0, **DRAWN), PROMPT, count=4, scores=0),
    make_work(8, SamplingParams(temperature=0, structured_outputs=GRAMMAR, logprobs=1)),
    make_work(9, SamplingParams(temperature=0, min_tokens=2, logit_bias={3: 90.0}), output=[1]),
    make_work(10, SamplingParams(temperature=0), output=[3], count=2, proposed=1),
    make_work(11, ALL_LOGPROBS, PROMPT[:5], [2, 3], count=5, scores=1),
    make_work(12, SamplingParams(allowed_token_ids=(2, 19, 31), **DRAWN), output=[1]),
    make_work(13, SamplingParams(bad_words_token_ids=((5,), (1, 6)), **DRAWN), output=[1]),
    make_work(14, PENALTIES, output=[1, 2], count=4, proposed=3),
]
ALLOWS = {8: [17, 20, 33]}


def controls(allows: Mapping[int, Sequence[int] | None] = ALLOWS) -> Controls:
    return Controls(FixedGrammars(allows), ENDS)


def logits_of(work: Sequence[TokenWork], seed: int = 4) -> torch.Tensor:
    rows = sum(one.num_logits for one in work)
    return torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(
    work: Sequence[TokenWork], logits: torch.Tensor, by: Controls | None = None
) -> SampledPart:
    """What a step draws; plain ones without controls, as the runner does it."""
    begun = (by or controls()).begin(work)
    if begun is None:
        return SampledPart(sample(logits.clone(), rows_of(work)))
    return begun.draw(logits.clone(), rows_of(work))


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
@pytest.mark.parametrize("seed", range(3))
def test_each_in_a_mixed_batch_gets_what_it_gets_alone(order: int, seed: int) -> None:
    work = MIXED[::order]
    logits = logits_of(work, seed)
    together = drawn(work, logits)
    tokens, start = iter(together.tokens), 0
    for one in work:
        alone = drawn([one], logits[start : start + one.num_logits])
        start += one.num_logits
        assert [next(tokens) for _ in range(one.num_draws)] == alone.tokens
        assert together.logprobs.get(one.handle) == alone.logprobs.get(one.handle)
        assert together.scored.get(one.handle) == alone.scored.get(one.handle)
    assert next(tokens, None) is None
    assert set(together.logprobs) == {4, 6, 8, 11, 14}
    assert {handle: len(told) for handle, told in together.scored.items()} == {5: 4, 7: 3, 11: 2}


CONTROLLED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 2.0},
    "presence": {"presence_penalty": 2.0, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {9: 4.0, 11: -4.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (9,)},
    "bad words": {"bad_words_token_ids": ((6,), (9, 11), (1, 9, 12))},
    "allowed": {"allowed_token_ids": (3, 5, 9, 11, 12, 20)},
    "logprobs": {"logprobs": 3},
    "budget": {"reasoning_budget": ReasoningBudget(3, 17)},
    "all": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 2.0},
        "min_tokens": 3,
        "bad_words_token_ids": ((9, 11),),
        "logprobs": 1,
    },
}


@pytest.mark.parametrize("drawing", [{"temperature": 0}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("asked", CONTROLLED.values(), ids=CONTROLLED)
def test_tokens_after_draft_tokens_are_drawn_as_if_these_were_output(
    asked: dict[str, Any], drawing: dict[str, Any]
) -> None:
    """With right draft tokens, all rows; with a wrong one, those up to it."""
    params = SamplingParams(**asked, **drawing)
    prompt, output, count = [7, 8, 9], [1, 9], 4
    logits = logits_of([make_work(1, params, prompt, output, count=count, proposed=count - 1)])
    tokens, logprobs = list[int](), list[Any]()
    for place in range(count):
        alone = drawn([make_work(1, params, prompt, [*output, *tokens])], logits[[place]])
        tokens += alone.tokens
        logprobs += alone.logprobs.get(1, ())
    known = make_work(1, params, prompt, output)
    for right in range(count):
        drafts = [*tokens[:right], *[token + 1 for token in tokens[right:]]][: count - 1]
        ids = np.array([output[-1], *drafts], np.int32)
        work = structs.replace(known, count=count, proposed=count - 1, token_ids=ids)
        found = drawn([MIXED[5], work, MIXED[0]], torch.cat([logits[:1], logits, logits[:1]]))
        kept = right + 1
        assert found.tokens[1 : 1 + kept] == tokens[:kept]
        assert found.logprobs.get(1, ()) == tuple(logprobs[:kept])


def test_a_row_without_a_token_ends_its_draft_tokens() -> None:
    """Where lists leave nothing after a draft token, no token is drawn, and none follows."""
    params = SamplingParams(
        temperature=0, allowed_token_ids=(5,), bad_words_token_ids=((5, 5),), logprobs=0
    )
    known = make_work(1, params)
    ids = np.array([9, 5, 5], np.int32)
    work = structs.replace(known, count=3, proposed=2, token_ids=ids)
    found = drawn([work], logits_of([work]))
    assert found.tokens[:2] == [5, NO_TOKEN]
    assert len(found.logprobs[1]) == 1
    plan = StepPlan(StepNumber(1), work=(work,))
    assert verify(plan, found.tokens).by_work() == [(5, NO_TOKEN)]


@pytest.mark.parametrize("known", range(4))
def test_masks_after_draft_tokens_bind_and_late_ones_end_the_step(known: int) -> None:
    """Where a mask is late no token is drawn, whatever the draft tokens are; the first row is."""
    params = SamplingParams(temperature=0, structured_outputs=GRAMMAR, logprobs=0)
    allows = [[9, 17], None, [11]][:known]
    ids = np.array([9, 20, 17, 30], np.int32)
    work = structs.replace(make_work(20, params), count=4, proposed=3, token_ids=ids)
    logits = torch.zeros(4, WORDS)
    logits[0, 20] = logits[1, 5] = logits[2, 30] = logits[3, 5] = 9.0
    logits[1, 17] = 5.0
    grammars = FixedGrammars({20: [20]}, {20: allows})
    found = drawn([work, MIXED[0]], torch.cat([logits, logits[:1]]), Controls(grammars, ENDS))
    [tokens, _] = verify(StepPlan(StepNumber(1), work=(work, MIXED[0])), found.tokens).by_work()
    assert tokens == (20, 17, 30, 11)[: known + 1]
    assert len(found.logprobs[20]) == known + 1
    assert [list(one.drafts) for one in grammars.wanted] == [[20, 17, 30]]


def test_a_plain_batch_needs_no_controls() -> None:
    plain = [one for one in MIXED if one.past is None]
    assert {one.handle for one in plain} == {1, 2, 3, 10}
    assert controls().begin(plain) is None
    assert controls().begin(MIXED) is not None


def test_scores_are_of_the_prompts_next_tokens_under_the_raw_logits() -> None:
    work = make_work(7, SamplingParams(prompt_logprobs=2, temperature=0), PROMPT, count=4, scores=2)
    logits = logits_of([work])
    scored = drawn([work], logits).scored[7]
    assert scored == tuple(token_logprobs(logits[i], PROMPT[6 + i], 2) for i in range(3))


def test_nothing_of_an_output_is_scored_when_it_is_computed_again() -> None:
    params = SamplingParams(prompt_logprobs=0)
    work = make_work(1, params, PROMPT[:4], [1, 2, 3], count=4, scores=0)
    assert drawn([work], logits_of([work])).scored == {}


def test_log_probabilities_are_told_before_anything_is_changed() -> None:
    params = SamplingParams(temperature=0, logit_bias={21: 100.0}, logprobs=2)
    work = make_work(1, params, output=[21, 22])
    logits = logits_of([work])
    found = drawn([work], logits)
    assert found.tokens == [21]
    assert found.logprobs == {1: (token_logprobs(logits[0], 21, 2),)}


def test_penalties_and_ends_are_those_of_adjust() -> None:
    params = SamplingParams(
        temperature=0, repetition_penalty=9.0, min_tokens=4, stop_token_ids=(6,)
    )
    work = make_work(1, params, PROMPT, [1, 2])
    logits = torch.zeros(1, WORDS)
    logits[0, [3, 4, 6, 9, 15]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 1.0])
    expected = logits[0].clone()
    adjust(expected, params, np.array([*PROMPT, 1, 2], np.int32), len(PROMPT), ENDS)
    assert drawn([work], logits).tokens == [int(expected.argmax())] == [15]


@pytest.mark.parametrize("allows", [None, []], ids=["too complex", "nothing"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_grammar_allows_nothing_there_is_no_token(
    allows: list[int] | None, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=1, structured_outputs=GRAMMAR, logprobs=1)
    work = [MIXED[3], make_work(20, params), MIXED[5]]
    logits = logits_of(work)
    found = drawn(work, logits, controls({20: allows}))
    assert found.tokens[1] == NO_TOKEN
    assert set(found.logprobs) == {4, 6}
    others = drawn([work[0], work[2]], logits[[0, 2]])
    assert [found.tokens[0], found.tokens[2]] == others.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_a_grammar_does_not_hold_yet_all_tokens_may_come(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, structured_outputs=GRAMMAR)
    free = replace(params, structured_outputs=None)
    reasons = [MIXED[3], make_work(20, params), MIXED[7]]
    logits = logits_of(reasons)
    found = drawn(reasons, logits)
    assert found.tokens == drawn([MIXED[3], make_work(20, free), MIXED[7]], logits).tokens
    bound = drawn(reasons, logits, controls({**ALLOWS, 20: [5]}))
    assert bound.tokens == [found.tokens[0], 5, found.tokens[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_is_at_its_end_goes_before_min_tokens(temperature: float) -> None:
    """The text is complete: no other token may follow, however few there are."""
    params = SamplingParams(
        temperature=temperature, seed=1, structured_outputs=GRAMMAR, min_tokens=9
    )
    work = [make_work(20, params, output=[1])]
    assert drawn(work, logits_of(work), controls({20: ENDS})).tokens[0] in ENDS
    assert drawn(work, logits_of(work), controls({20: [*ENDS, 11]})).tokens == [11]


def test_a_grammar_reads_the_output_and_not_the_prompt() -> None:
    grammars = FixedGrammars({20: [1], 21: [1]})
    params = SamplingParams(structured_outputs=GRAMMAR)
    work = [make_work(20, params, output=[5, 6]), make_work(21, params), MIXED[3]]
    Controls(grammars).begin([*work, make_work(22, None, start=0, count=2)])
    assert [(one.request_id, list(one.output)) for one in grammars.wanted] == [
        ("r20", [5, 6]),
        ("r21", []),
    ]


def of_lists(**asked: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, **asked})


def chosen(params: SamplingParams, order: Sequence[int], output: Sequence[int] = ()) -> int:
    """The token that a greedy row takes whose logits fall in this order, all others behind."""
    logits = torch.full((1, WORDS), -50.0)
    logits[0, list(order)] = torch.arange(len(order), 0, -1.0)
    work = make_work(30, params, output=output)
    [token] = drawn([work], logits, controls({30: [3, 17, 20, 33]})).tokens
    return token


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_only_allowed_tokens_come(temperature: float) -> None:
    params = of_lists(allowed_token_ids=(2, 19, 31), temperature=temperature, seed=1)
    seen = set()
    for seed in range(40):
        work = [make_work(30, replace(params, seed=seed))]
        seen.update(drawn(work, logits_of(work, seed)).tokens)
    assert seen == {2, 19, 31}


def test_the_last_token_of_a_bad_word_is_hidden_behind_its_first_ones_in_the_output() -> None:
    params = of_lists(bad_words_token_ids=((5,), (7, 8, 6)))
    assert chosen(params, [5, 6, 9]) == 6, "a word of one token never comes"
    assert chosen(params, [6, 9], [1, 7, 8]) == 9
    assert chosen(params, [6, 9], [7, 8, 1]) == 6, "they are not at its end"
    assert chosen(params, [6, 9], [8]) == 6
    assert chosen(params, [7, 9], [5]) == 7, "others begin so too"
    prompt = make_work(30, params, [7, 8], [])
    logits = torch.zeros(1, WORDS)
    logits[0, 6] = 9.0
    assert drawn([prompt], logits).tokens == [6], "the prompt is not the output"


def test_lists_go_before_biases_and_penalties() -> None:
    params = of_lists(allowed_token_ids=(11, 12), logit_bias={5: 100.0}, repetition_penalty=9.0)
    assert chosen(params, [5, 11, 12]) == 11
    assert chosen(params, [5, 11, 12], [11]) == 12
    assert chosen(of_lists(bad_words_token_ids=((5,),), logit_bias={5: 100.0}), [5, 9]) == 9


def test_lists_and_a_grammar_both_bind() -> None:
    params = of_lists(structured_outputs=GRAMMAR, allowed_token_ids=(5, 20, 33))
    assert chosen(params, [5, 17, 20, 33]) == 20
    worded = of_lists(structured_outputs=GRAMMAR, bad_words_token_ids=((17,),))
    assert chosen(worded, [5, 17, 33]) == 33
    assert chosen(replace(params, allowed_token_ids=(5, 6)), [5]) == NO_TOKEN


def test_min_tokens_gives_way_where_only_ends_are_allowed() -> None:
    assert chosen(of_lists(allowed_token_ids=ENDS, min_tokens=9), [5]) in ENDS
    assert chosen(of_lists(allowed_token_ids=(*ENDS, 9), min_tokens=9), [3, 5]) == 9


def test_where_lists_leave_nothing_there_is_no_token() -> None:
    params = of_lists(allowed_token_ids=(5,), bad_words_token_ids=((5,),))
    assert chosen(params, [5, 6]) == NO_TOKEN


def test_likelihoods_are_told_before_lists_bind() -> None:
    params = of_lists(allowed_token_ids=(2,), logprobs=2)
    work = make_work(1, params)
    logits = logits_of([work])
    found = drawn([work], logits)
    assert found.tokens == [2]
    assert found.logprobs == {1: (token_logprobs(logits[0], 2, 2),)}
