"""Masks of answers: a slow grammar delays its own answers only, and has a budget."""

import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process import answer_masks
from kvell.engine.sampling.grammar_process.answer_masks import MaskedRequest
from kvell.engine.sampling.grammars import MOST_PATIENCE_SECONDS, Allowed, Grammars, MaskPatience
from kvell.models.text.tokenizer import Tokenizer
from kvell.vocabulary import RequestId
from tests.engine.sampling.walking import END, VOCAB, masks_of
from tests.engine.sampling.workers import workers_of

SLOW, QUICK, OTHER = (StructuredOutputs(regex=f"[{letters}]+") for letters in ("ab", "cd", "ef"))
PATIENCE_SECONDS = 60.0
LETTER = 83
"""The token "c"."""


@pytest.fixture
def own(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(answer_masks, "SLOW_LANES", 1)
    grammars = Grammars(tokenizer.as_json, VOCAB, [END])
    for asked in (SLOW, QUICK, OTHER):
        grammars.check(asked)
    yield grammars
    grammars.close()


@pytest.fixture
def checkers(own: Grammars) -> set[int]:
    return workers_of(own)


@pytest.fixture
def stopped() -> Iterator[set[int]]:
    pids: set[int] = set()
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def request(number: int, asked: StructuredOutputs, tenant: str, length: int = 0) -> MaskedRequest:
    return MaskedRequest(RequestId(str(number)), asked, [LETTER] * length, tenant, 0)


def follow(grammars: Grammars, *requests: MaskedRequest) -> threading.Event:
    """Ask for masks; the event is set when the first late one is ready."""
    grammars.answers.follow(requests)
    rung = threading.Event()
    grammars.answers.late([one.request_id for one in requests], rung.set)
    return rung


def late(grammars: Grammars, *requests: MaskedRequest) -> set[str]:
    return set(grammars.answers.late([one.request_id for one in requests], lambda: None))


def assert_same(mask: Allowed | None, expected: Allowed | None) -> None:
    assert mask is not None and expected is not None and np.array_equal(mask, expected)


def strike(grammars: Grammars, checkers: set[int], guilty: MaskedRequest) -> set[int]:
    """Let the quick worker exceed its processor time at a mask; return the slow workers."""
    masks_of(grammars, [request(99, OTHER, "z")])
    [quick] = workers_of(grammars) - checkers
    os.kill(quick, signal.SIGSTOP)
    grammars.answers.ask([guilty])
    os.kill(quick, signal.SIGPROF)
    os.kill(quick, signal.SIGCONT)
    assert masks_of(grammars, [guilty])[int(guilty.request_id)] is not None
    return workers_of(grammars) - checkers


def test_a_slow_grammar_goes_on_apart_and_others_wait_for_none_of_it(
    own: Grammars, checkers: set[int], stopped: set[int]
) -> None:
    slow, quick = request(1, SLOW, "a"), request(2, QUICK, "b")
    expected = masks_of(own, [request(7, SLOW, "c"), request(8, QUICK, "c")])
    stopped |= strike(own, checkers, slow)
    assert len(stopped) == 1, "the quick worker has ended"
    for pid in stopped:
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.getsid(pid) == pid, "the class counts beside the front, not only in the session"
        os.kill(pid, signal.SIGSTOP)
    again = request(3, SLOW, "c")  # its grammar is known to be slow
    follow(own, slow, again, quick)
    assert_same(masks_of(own, [quick])[2], expected[8])
    assert late(own, again, quick) == {"3"}
    rung = follow(own, again, quick)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert rung.wait(PATIENCE_SECONDS)
    assert_same(masks_of(own, [again])[3], expected[7])


def test_a_tenant_with_several_slow_grammars_begins_apart(
    own: Grammars, checkers: set[int], monkeypatch: pytest.MonkeyPatch, stopped: set[int]
) -> None:
    monkeypatch.setattr(answer_masks, "MOST_STRIKES", 0)
    monkeypatch.setattr(answer_masks, "STRIKE_SECONDS", 1e9)
    stopped |= strike(own, checkers, request(1, SLOW, "a"))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    mine, others = request(2, QUICK, "a"), request(3, QUICK, "b")
    follow(own, mine, others)
    assert masks_of(own, [others])[3] is not None
    assert late(own, mine, others) == {"2"}


def test_an_answer_has_a_budget_of_processor_time(
    own: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(1, QUICK, "a")
    assert masks_of(own, [asked])[1] is not None
    monkeypatch.setattr(answer_masks, "ANSWER_SECONDS", -1.0)
    assert masks_of(own, [request(1, QUICK, "a", 1)])[1] is None
    assert masks_of(own, [request(2, QUICK, "a")])[2] is None, "also from the first mask on"
    monkeypatch.undo()
    assert masks_of(own, [request(3, QUICK, "a")])[3] is not None, "the grammar is not to blame"


def test_patience_is_a_share_of_the_time_and_ends() -> None:
    patience = MaskPatience(5.0)
    assert patience.left_seconds(5.0) == 0
    assert patience.left_seconds(5.02) == pytest.approx(0.002)
    patience.spend(0.0015)
    assert patience.left_seconds(5.02) == pytest.approx(0.0005)
    assert patience.left_seconds(99.0) == MOST_PATIENCE_SECONDS
    patience.spend(1.0)
    assert patience.left_seconds(99.0) == 0
