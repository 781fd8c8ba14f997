"""Requests whose grammar is being compiled: the engine goes on, and they can leave."""

import select
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.core.journal import Journal, PlanAsked
from kvell.engine.protocol.messages import Cancel, Drain, Drained, Event, Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process.checking import (
    GOOD,
    TOO_COMPLEX,
    GrammarChecks,
    Verdict,
)
from kvell.engine.sampling.grammar_process.masking import Found, MaskJob, MaskWorker, Trouble
from kvell.engine.sampling.grammars import AwaitedGrammars, Grammars
from kvell.errors import TryLater
from kvell.llm import LLM
from kvell.serving.gate import CommandGate, front_of, lone_owner
from kvell.serving.lone import LocalInstance
from kvell.vocabulary import RequestId

PROMPT = np.arange(300, 320, dtype="<i4").tobytes()
PLAIN = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FORMED = SamplingParams(
    temperature=0, max_tokens=4, structured_outputs=StructuredOutputs(regex="[a-z ]{40}")
)


class SlowChecks(GrammarChecks):
    def __init__(self, asked: list[Future[Verdict]]) -> None:
        self.asked = asked

    def check(self, constraint: StructuredOutputs, tenant: str = "") -> Future[Verdict]:
        self.asked.append(Future())
        return self.asked[-1]


class SlowGrammars(Grammars):
    """Real ones, but that the test says when they are compiled."""

    def __init__(self, real: Grammars) -> None:
        self.asked: list[Future[Verdict]] = []
        self.checks = SlowChecks(self.asked)
        self.masks, self.close, self.answers = real.masks, real.close, real.answers  # type: ignore[method-assign]

    def known(self, asked: StructuredOutputs) -> bool:
        return False


class Setting:
    def __init__(self, llm: LLM, journal: Journal) -> None:
        self.engine, self.journal = llm.engine, journal
        [(name, real)] = llm.engine.grammars.grammars.items()
        assert real is not None
        self.grammars = real if isinstance(real, SlowGrammars) else SlowGrammars(real)
        self.grammars.asked.clear()
        known = AwaitedGrammars({name: self.grammars}, llm.engine.link.bell.ring)
        llm.engine.grammars = known
        journal.entries.clear()

    def journaled(self) -> list[str]:
        return [one.request_id for one in self.journal.entries if isinstance(one, Submit)]


@pytest.fixture(scope="module")
def loaded(shallow_path: Path) -> tuple[LLM, Journal]:
    journal = Journal()
    llm = LLM(
        str(shallow_path),
        kv_memory_bytes=64 << 20,
        dtype="float32",
        max_model_len=256,
        journal=journal,
    )
    return llm, journal


@pytest.fixture
def setting(loaded: tuple[LLM, Journal]) -> Setting:
    return Setting(*loaded)


def submit(name: str, sampling: SamplingParams = FORMED, attempt: int = 0) -> Submit:
    return Submit(RequestSpec(RequestId(name), PROMPT, sampling), attempt=attempt)


def ends(events: list[Event]) -> list[tuple[str, str]]:
    return [(one.request_id, one.reason) for one in events if isinstance(one, Finished)]


def until_idle(instance: LocalInstance) -> list[Event]:
    events: list[Event] = []
    while instance.has_work():
        events += instance.poll()
    return events


def until_over(gate: CommandGate) -> list[Event]:
    wakes = gate.wakes()
    assert wakes is not None
    events: list[Event] = []
    while gate.has_requests():
        if gate.has_work():
            events += gate.advance()
        else:
            select.select([wakes], [], [])
        events += gate.woken()
    return events


def test_others_are_served_while_a_grammar_compiles(setting: Setting) -> None:
    instance = LocalInstance(setting.engine)
    instance.send(submit("formed"))
    instance.send(submit("plain", PLAIN))
    events: list[Event] = []
    while ("plain", "length") not in ends(events):
        events += instance.poll()
    assert setting.journaled() == ["plain"], "the core does not know the other"
    assert instance.has_work() and not setting.engine.has_work()
    assert setting.engine.pulse().waiting == 1
    setting.grammars.asked[0].set_result(GOOD)
    assert ends(until_idle(instance)) == [("formed", "length")]
    assert setting.journaled() == ["plain", "formed"]
    assert setting.engine.pulse().waiting == 0


@pytest.mark.parametrize("verdict", [TOO_COMPLEX, TryLater("no process")])
def test_a_grammar_that_is_no_good_refuses_its_requests_only(
    setting: Setting, verdict: Verdict | TryLater
) -> None:
    instance = LocalInstance(setting.engine)
    for name in ("a", "b"):
        instance.send(submit(name))
    first, second = setting.grammars.asked
    if isinstance(verdict, TryLater):
        first.set_exception(verdict)
    else:
        first.set_result(verdict)
    second.set_result(GOOD)
    events = until_idle(instance)
    assert sorted(ends(events)) == [("a", "refused"), ("b", "length")]
    [refused] = [one for one in events if isinstance(one, Finished) and one.reason == "refused"]
    assert refused.prompt_tokens == len(PROMPT) // 4
    assert refused.try_later == isinstance(verdict, TryLater)
    if not refused.try_later:
        assert (refused.field, refused.bound) == ("structured_outputs.regex", "grammar")
    assert setting.journaled() == ["b"]


def test_a_request_that_waits_can_be_cancelled(setting: Setting) -> None:
    gate = CommandGate(setting.engine, lone_owner)
    gate.accept(submit("a", attempt=3))
    assert gate.accept(Cancel(RequestId("a"), attempt=2)) == [], "an earlier attempt"
    assert ends(gate.accept(Cancel(RequestId("a")))) == [("a", "cancelled")]
    setting.grammars.asked[0].set_result(GOOD)
    assert gate.woken() == [] and not gate.has_requests()
    assert setting.journaled() == []


def test_a_front_that_goes_takes_along_what_waits(setting: Setting) -> None:
    gate = CommandGate(setting.engine, front_of)
    gate.accept(submit("x:a"), "x")
    gate.accept(submit("y:a"), "y")
    assert ends(gate.cancel_of("x")) == [("x:a", "cancelled")]
    for future in setting.grammars.asked:
        future.set_result(GOOD)
    events = gate.woken()
    events += until_over(gate)
    assert ends(events) == [("y:a", "length")]


def test_a_draining_instance_serves_what_waits(setting: Setting) -> None:
    gate = CommandGate(setting.engine, lone_owner)
    gate.accept(submit("a"))
    assert gate.accept(Drain()) == [] and not gate.drained
    setting.grammars.asked[0].set_result(GOOD)
    events = gate.woken()
    assert not gate.drained
    events += until_over(gate)
    assert ends(events) == [("a", "length")] and events[-1] == Drained()
    assert sum(len(one.token_ids) for one in events if isinstance(one, Tokens)) == 4


def test_a_later_attempt_takes_the_place_of_an_earlier_one(setting: Setting) -> None:
    setting.engine.handle(submit("a", attempt=0))
    setting.engine.handle(submit("a", attempt=1))
    assert setting.engine.pulse().waiting == 1
    for future in setting.grammars.asked:
        future.set_result(TOO_COMPLEX)
    [finished] = setting.engine.woken()
    assert isinstance(finished, Finished) and finished.attempt == 1


def test_others_are_served_while_a_mask_is_computed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, may_go_on = MaskWorker.masks, threading.Event()

    def awaited(
        worker: MaskWorker, jobs: Sequence[MaskJob], forget: Iterable[int]
    ) -> Iterator[tuple[MaskJob, Found | Trouble]]:
        if any(job.length == 2 for job in jobs):
            assert may_go_on.wait(60.0)
        yield from masks(worker, jobs, forget)

    monkeypatch.setattr(MaskWorker, "masks", awaited)
    instance = LocalInstance(setting.engine)
    instance.send(submit("formed"))
    setting.grammars.asked[0].set_result(GOOD)
    events: list[Event] = []
    while sum(isinstance(one, Tokens) for one in events) < 2:
        events += instance.poll()
    instance.send(submit("plain", PLAIN))
    while ("plain", "length") not in ends(events):
        events += instance.poll()
    assert instance.has_work() and ends(events) == [("plain", "length")]
    assert any(
        "formed" in entry.held for entry in setting.journal.entries if isinstance(entry, PlanAsked)
    )
    may_go_on.set()
    assert ends(until_idle(instance)) == [("formed", "length")]


def test_the_masks_of_the_last_answer_are_forgotten_when_it_ends(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    answers = setting.grammars.answers
    forget = answers.forget

    def noted(request_ids: Iterable[RequestId]) -> None:
        names = list(request_ids)
        forgotten.extend(names)
        forget(names)

    monkeypatch.setattr(answers, "forget", noted)
    instance = LocalInstance(setting.engine)
    for name in ("whole", "cancelled"):
        instance.send(submit(name))
        setting.grammars.asked[-1].set_result(GOOD)
        if name == "cancelled":
            instance.poll()
            instance.send(Cancel(RequestId(name)))
        until_idle(instance)
        assert forgotten[-1:] == [name]
