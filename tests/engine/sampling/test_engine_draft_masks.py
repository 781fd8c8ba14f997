"""Masks after draft tokens: those that the answer would have there, and its position stays."""

import json
import os
import random
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llguidance import LLTokenizer
from msgspec import structs

from kvell.engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from kvell.engine.sampling.grammar_process import answer_masks
from kvell.engine.sampling.grammar_process.masking import (
    QUICK,
    Found,
    MaskJob,
    MaskWorker,
    Trouble,
)
from kvell.engine.sampling.grammar_process.matchers import Matchers
from kvell.engine.sampling.grammar_process.messages import AskMasks, DraftMasks, Mask, Need
from kvell.engine.sampling.grammar_process.processes import Worker
from kvell.engine.sampling.grammars import Allowed, Grammars, MaskedRequest
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import RequestId
from tests.engine.sampling.walking import END, VOCAB, masked, masks_of, release, walk
from tests.engine.sampling.workers import workers_of

PATIENCE_SECONDS = 60.0
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "size": {"type": "integer"}},
        "required": ["city", "size"],
        "additionalProperties": False,
    },
    "maxItems": 2,
}
FORMS = {
    "schema": StructuredOutputs(json=json.dumps(SCHEMA)),
    "regex": StructuredOutputs(regex="(a|bc)*d{2,5}[x-z ]{0,9}"),
    "choice": StructuredOutputs(choice=("yes", "yes and no", "no", "never")),
}
REFUSED = 198
"""A line feed, which no form allows at any place."""


@pytest.fixture
def own(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer.as_json, VOCAB, [END])
    for form in FORMS.values():
        grammars.check(form)
    yield grammars
    grammars.close()


def drafted(
    grammars: Grammars,
    form: StructuredOutputs,
    output: Sequence[int],
    drafts: Sequence[int],
    handle: int = 1,
) -> tuple[Allowed | None, ...]:
    """The masks after draft tokens of an answer whose next mask is known."""
    grammars.check(form)  # else its masks are not known to be quick
    asked = masked(handle, form, output)
    masks_of(grammars, [asked])
    masks_of(grammars, [replace(asked, drafts=tuple(drafts))])
    return grammars.answers.draft_masks([asked.request_id], PATIENCE_SECONDS)[asked.request_id]


def assert_same(mask: Allowed | None, expected: Allowed | None) -> None:
    assert (mask is None) == (expected is None)
    assert mask is None or expected is None or np.array_equal(mask, expected)


def next_mask(
    grammars: Grammars, form: StructuredOutputs, output: Sequence[int], handle: int
) -> Allowed | None:
    return masks_of(grammars, [masked(handle, form, output)]).get(handle)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("seed", range(2))
def test_masks_after_drafts_are_those_of_the_answer_there(
    grammars: Grammars, form: StructuredOutputs, seed: int
) -> None:
    """Right drafts, and those that begin right, at places all over the text, its end included."""
    text = [*walk(grammars, form, seed), END]
    draw = random.Random(seed)
    places = sorted(draw.sample(range(len(text)), min(12, len(text))))
    for place in places:
        right = text[place : place + 5]
        cut = draw.randrange(len(right) + 1)
        masks = drafted(grammars, form, text[:place], [*right[:cut], REFUSED, *right])
        assert len(masks) >= cut
        for index in range(cut):
            known = text[: place + index + 1]
            assert_same(masks[index], next_mask(grammars, form, known, 100 + index))
        if len(masks) > cut:  # the text was complete: only its end may follow anything
            last = next_mask(grammars, form, text[: place + cut], 105)
            assert last is not None and np.flatnonzero(last).tolist() == [END]
        assert_same(
            next_mask(grammars, form, text[:place], 1), next_mask(grammars, form, text[:place], 99)
        )
        release(grammars, range(99, 106))
    release(grammars, [1])


def test_the_answer_goes_on_from_its_position(grammars: Grammars) -> None:
    """Whatever was drafted, each next mask is that of an answer without drafts."""
    form = FORMS["schema"]
    text, draw = walk(grammars, form, 5), random.Random(5)
    for place in range(len(text)):
        drafts = draw.choice([text[place : place + 3], [REFUSED], [*text[place:], END, END]])
        if drafts:
            drafted(grammars, form, text[:place], drafts, 1)
        following = next_mask(grammars, form, text[: place + 1], 1)
        assert_same(following, next_mask(grammars, form, text[: place + 1], 2))
    release(grammars, [1, 2])


def test_a_refused_draft_ends_them(own: Grammars) -> None:
    form = FORMS["choice"]
    assert drafted(own, form, [], [REFUSED, REFUSED]) == ()


def test_drafts_may_end_the_reasoning(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Within it any token may follow; after it the grammar begins, and then it is undone."""
    form = replace(FORMS["schema"], reasoning=Reasoning((".",)))
    thought = tokenizer.encode("I think so.", add_special_tokens=False).tolist()
    answer = walk(grammars, FORMS["schema"], 3)[:4]
    for cut in range(len(thought)):
        drafts = [*thought[cut:], *answer]
        masks = drafted(grammars, form, thought[:cut], drafts)
        assert len(masks) == len(drafts)
        inside = len(thought) - cut - 1
        assert all(mask is None for mask in masks[:inside])
        for index, mask in enumerate(masks[inside:]):
            expected = next_mask(grammars, FORMS["schema"], answer[:index], 50 + index)
            assert mask is not None
            assert_same(mask, expected)
        assert masks_of(grammars, [masked(1, form, thought[:cut])]) == {}, "it still reasons"
        release(grammars, range(50, 60))
    release(grammars, [1])


def request(name: int, length: int = 0, drafts: tuple[int, ...] = ()) -> MaskedRequest:
    [letter] = LETTER
    return MaskedRequest(RequestId(str(name)), FORMS["regex"], [letter] * length, drafts=drafts)


LETTER = [81]
"""The token "a"."""


def test_late_masks_are_not_awaited_and_cost_the_answer_nothing(own: Grammars) -> None:
    checkers = workers_of(own)
    masks_of(own, [request(1)])
    [quick] = workers_of(own) - checkers
    os.kill(quick, signal.SIGSTOP)
    try:
        own.masks([request(1, drafts=(LETTER[0],) * 3)]).result(PATIENCE_SECONDS)
        assert own.answers.draft_masks([RequestId("1")], 0.0) == {"1": ()}
    finally:
        os.kill(quick, signal.SIGCONT)
    assert masks_of(own, [request(1, 1)])[1] is not None
    assert len(drafted(own, FORMS["regex"], LETTER, LETTER * 3)) == 3


def test_a_worker_that_ends_at_drafts_loses_no_answer(own: Grammars) -> None:
    checkers = workers_of(own)
    expected = masks_of(own, [request(1)])[1]
    [quick] = workers_of(own) - checkers
    os.kill(quick, signal.SIGSTOP)
    own.masks([request(1, drafts=(LETTER[0],) * 3)]).result(PATIENCE_SECONDS)
    os.kill(quick, signal.SIGPROF)
    os.kill(quick, signal.SIGCONT)
    assert own.answers.draft_masks([RequestId("1")], PATIENCE_SECONDS) == {"1": ()}
    assert_same(masks_of(own, [request(1)])[1], expected)
    assert own.answers.find_undrafted([RequestId("1")]) == {"1"}, "its grammar is slow now"
    assert masks_of(own, [request(1, 1)])[1] is not None


def test_drafts_have_a_budget_of_their_own(own: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take no time from the answer's masks, and end when theirs is used."""
    masks = MaskWorker.masks
    taken_seconds = 0.0

    def timed(
        worker: MaskWorker, jobs: Sequence[MaskJob], forget: Iterable[int]
    ) -> Iterator[tuple[MaskJob, Found | Trouble]]:
        for job, found in masks(worker, jobs, forget):
            if isinstance(found, DraftMasks):
                found = structs.replace(found, seconds=taken_seconds)  # noqa: PLW2901
            yield job, found

    monkeypatch.setattr(MaskWorker, "masks", timed)
    assert len(drafted(own, FORMS["regex"], [], LETTER * 3)) == 3
    assert own.answers.find_undrafted([RequestId("1")]) == frozenset()
    taken_seconds = answer_masks.ANSWER_SECONDS + 1.0
    assert len(drafted(own, FORMS["regex"], LETTER, LETTER * 3)) == 3
    assert own.answers.find_undrafted([RequestId("1")]) == {"1"}
    assert masks_of(own, [request(1, 2)])[1] is not None, "the answer goes on"
    assert drafted(own, FORMS["regex"], LETTER * 2, LETTER * 3) == ()


class Stubborn:
    """A matcher that cannot go back."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def rollback(self, _: int) -> bool:
        return False


def test_a_position_that_is_lost_is_forgotten(tokenizer: Tokenizer) -> None:
    matchers = Matchers(LLTokenizer(tokenizer.as_json(), eos_token=[END]))
    letters = np.array(LETTER * 2, "<i4").tobytes()
    matchers.mask(Need(1, 1.0, b"", FORMS["regex"]))
    place = matchers.places[1]
    place.matcher = Stubborn(place.matcher)
    masks = matchers.draft_masks(Need(1, 1.0, b"", drafts=letters))
    assert masks.is_lost and len(masks.masks) == 2
    assert 1 not in matchers.places
    assert matchers.mask(Need(1, 1.0, letters, FORMS["regex"])).kind == "bits"


class LosingLine:
    """A worker that loses the position of each answer at its draft tokens."""

    def __init__(self) -> None:
        self.needs: list[Need] = []

    def send(self, message: AskMasks, _: float) -> None:
        self.needs += message.needs

    def receive(self, _: float) -> Mask | DraftMasks:
        return DraftMasks((), is_lost=True) if self.needs[-1].drafts else Mask("free")


def test_an_answer_whose_position_is_lost_is_read_again(own: Grammars) -> None:
    line = LosingLine()
    worker = MaskWorker(own.processes, QUICK)
    worker.worker = Worker(line, 0, own.processes.template)  # type: ignore[arg-type]
    job = MaskJob(1, FORMS["regex"], LETTER * 2, 2, 0.0)
    for each in (job, replace(job, drafts=(1, 2)), job):
        assert len(list(worker.masks([each], ()))) == 1
    first, drafted_need, last = line.needs
    assert (drafted_need.asked, drafted_need.fresh) == (None, b"")
    assert first == last and last.asked is not None
