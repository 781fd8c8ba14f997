"""Readers of one engine: each has its own events, and no exception leaves anything behind."""

import gc
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import pytest

from kvell.elastic.arena import ActivationModel
from kvell.engine.core.journal import Journal, replay
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Event, Finished, Tokens
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.setup.contract import make_contract
from kvell.serving import readers
from kvell.serving.readers import EventReader, SharedInstance
from kvell.vocabulary import RequestId
from tests.engine.conftest import make_engine_core, make_layout, make_submit
from tests.engine.traffic import limits
from tests.engine.virtual_model import VirtualModel, expected_output

LAYOUT = make_layout((0, 9), 40)
PROMPT, COUNT = list(range(20)), 6
DEPTHS = pytest.mark.parametrize("depth", [0, 1], ids=["in-turn", "ahead"])


class Failing(VirtualModel):
    """Raises in place of a step, or after it was computed."""

    def __init__(self) -> None:
        super().__init__(LAYOUT)
        self.before: dict[int, BaseException] = {}
        self.after: dict[int, BaseException] = {}

    def run(self, plan: StepPlan) -> StepResult:
        if failure := self.before.pop(int(plan.step), None):
            raise failure
        result = super().run(plan)
        if failure := self.after.pop(int(plan.step), None):
            raise failure
        return result


class Served:
    def __init__(self, depth: int = 0) -> None:
        contract = make_contract("virtual", LAYOUT, 0, 10_000, 64)
        self.journal, self.model = Journal(), Failing()
        core = make_engine_core(LAYOUT, replace(limits(), depth=depth))
        need = ActivationModel(fixed_bytes=100, token_bytes=10, logits_row_bytes=50)
        self.engine = Engine(core, self.model, contract, need, journal=self.journal)
        self.shared = SharedInstance(self.engine, begin=lambda: None)
        self._names = iter(range(1 << 30))

    def ask(self, reader: EventReader, prompt: Sequence[int] = PROMPT, count: int = COUNT) -> str:
        name = f"r{next(self._names)}"
        reader.send(make_submit(name, prompt, count))
        return name

    def answer(self, prompt: Sequence[int] = PROMPT, count: int = COUNT) -> list[int]:
        with self.shared.reader() as reader:
            name = self.ask(reader, prompt, count)
            return tokens_of(read(reader, name), name)

    def assert_idle(self) -> None:
        assert self.shared.call(lambda: self.engine.core.has_requests) is False
        assert self.shared.call(self.engine.core.audit) == ()
        assert self.shared.call(lambda: self.engine.core.memory.snapshot().holders) == ()

    def assert_serves(self) -> None:
        assert self.answer() == expected_output(PROMPT, COUNT)
        self.assert_idle()


def read(reader: EventReader, *names: str) -> list[Event]:
    events: list[Event] = []
    left = set(names)
    while left:
        batch = reader.take()
        events += batch
        left -= {event.request_id for event in batch if isinstance(event, Finished)}
    return events


def tokens_of(events: list[Event], name: str) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, Tokens) and event.request_id == name
        for token in event.token_ids
    ]


@pytest.fixture(params=[0, 1], ids=["in-turn", "ahead"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    yield Served(request.param)


def test_each_reader_has_its_own_events(served: Served) -> None:
    with served.shared.reader() as one, served.shared.reader() as other:
        first, second = served.ask(one), served.ask(other, PROMPT[5:], 9)
        events = read(other, second)
        assert tokens_of(events, second) == expected_output(PROMPT[5:], 9)
        assert tokens_of(events, first) == []
        assert tokens_of(read(one, first), first) == expected_output(PROMPT, COUNT)
    served.assert_idle()


def test_readers_of_many_threads_are_all_served(served: Served) -> None:
    prompts = [list(range(index, index + 10)) for index in range(6)]
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        answers[index] = served.answer(prompts[index], 4 + index)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(prompts):
        assert answers[index] == expected_output(prompt, 4 + index)
    served.assert_idle()


def test_no_step_is_taken_while_no_reader_waits(served: Served) -> None:
    with served.shared.reader() as reader:
        name = served.ask(reader, count=20)
        reader.take()
        before = served.shared.call(lambda: int(served.engine.core.step))
        with served.shared.reader():
            pass
        assert served.shared.call(lambda: int(served.engine.core.step)) == before
        read(reader, name)


def test_what_a_closed_reader_has_is_cancelled_with_its_steps(served: Served) -> None:
    undone: list[str] = []
    with served.shared.reader() as reader:
        reader.undo.append(lambda: undone.append("first"))
        reader.undo.append(lambda: undone.append("second"))
        for _ in range(3):
            served.ask(reader, count=30)
        reader.take()
        assert undone == []
    assert undone == ["second", "first"]
    served.assert_idle()
    served.assert_serves()


def test_a_reader_that_is_freed_is_closed(served: Served) -> None:
    reader = served.shared.reader()
    served.ask(reader, count=30)
    reader.take()
    del reader
    gc.collect()
    served.assert_idle()


def test_credits_go_to_readers_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvell.engine.engine.CREDITS", 3)
    served = Served()
    with served.shared.reader() as greedy, served.shared.reader() as modest:
        many = [served.ask(greedy, count=4) for _ in range(12)]
        one = served.ask(modest, PROMPT[3:])
        events = read(modest, one)
        assert tokens_of(events, one) == expected_output(PROMPT[3:], COUNT)
        waiting = served.shared.call(lambda: served.engine.core.counters.num_waiting)
        assert waiting <= 3
        ended = read(greedy, *many)
        assert sum(isinstance(event, Finished) for event in ended) == len(many)
        assert all(event.reason == "length" for event in ended if isinstance(event, Finished))
    served.assert_idle()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, SystemExit, ValueError])
@pytest.mark.parametrize("when", ["before", "after"])
@DEPTHS
def test_what_a_step_raises_reaches_all_readers_and_the_next_are_served(
    kind: type[BaseException], when: str, depth: int
) -> None:
    served = Served(depth)
    assert served.answer(PROMPT, 3) == expected_output(PROMPT, 3)  # something is cached
    failure = kind("in a step")
    with served.shared.reader() as one, served.shared.reader() as other:
        served.ask(one)
        served.ask(other, PROMPT[7:])
        one.take()
        getattr(served.model, when)[int(served.engine.core.step) + 1] = failure
        with pytest.raises(kind, match="in a step"):
            read(one, "never")
        with pytest.raises(kind, match="in a step"):
            read(other, "never")
        with pytest.raises(kind, match="in a step"):
            one.take()
    served.assert_serves()
    assert served.answer(PROMPT, 3) == expected_output(PROMPT, 3)
    core = make_engine_core(LAYOUT, replace(limits(), depth=depth))
    plans = replay(served.journal.entries, core)
    assert plans[-1].step == served.engine.core.step
    assert core.audit() == ()


class Raises:
    """Raises once, at the n-th line that a thread runs in some files.

    :ivar raised: whether it has.
    """

    def __init__(self, failure: type[BaseException], files: Sequence[str]) -> None:
        self._failure, self._files = failure, tuple(files)
        self.left, self.raised = -1, False

    def arm(self, line: int) -> None:
        """Trace the calling thread; a trace function that has raised is called no more."""
        self.left, self.raised = line, False
        sys.settrace(self if line >= 0 else None)

    def __call__(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if self.raised or self.left < 0 or not self._matches(frame):
            return None
        return self._line

    def _matches(self, frame: FrameType) -> bool:
        return any(part in frame.f_code.co_filename for part in self._files)

    def _line(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event == "line" and not self.raised and self.left >= 0:
            self.left -= 1
            if self.left < 0:
                self.raised = True
                raise self._failure(f"at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self._line


ENGINE = ("kvell/engine/engine.py", "kvell/engine/core/", "kvell/engine/planning/", "serving/gate")


@DEPTHS
@pytest.mark.parametrize("part", [3, pytest.param(30, marks=pytest.mark.long)])
def test_memory_that_is_missing_anywhere_in_the_engine_spoils_nothing(
    depth: int, part: int
) -> None:
    tracer = Raises(MemoryError, ENGINE)
    served = Served(depth)
    expected = [expected_output(PROMPT[index:], COUNT) for index in range(3)]
    line, hits = 0, 0
    while True:
        served.shared.call(partial(tracer.arm, line))
        try:
            with served.shared.reader() as reader:
                names = [served.ask(reader, PROMPT[index:]) for index in range(3)]
                events = read(reader, *names)
        except MemoryError:
            hits += 1
        else:
            assert [tokens_of(events, name) for name in names] == expected
        raised = tracer.raised
        served.shared.call(partial(tracer.arm, -1))
        served.assert_serves()
        if not raised:
            break
        line += 1 + line // part
    assert hits > 10


CALLER = (readers.__file__,)


def test_an_interrupt_at_any_line_of_a_call_leaves_nothing() -> None:
    served, line = Served(1), 0
    while True:
        tracer = Raises(KeyboardInterrupt, CALLER)
        previous = sys.gettrace()
        tracer.arm(line)
        try:
            answer = served.answer()
        except KeyboardInterrupt:
            answer = []
        finally:
            sys.settrace(previous)
        served.assert_serves()
        if not tracer.raised:
            assert answer == expected_output(PROMPT, COUNT)
            break
        line += 1 + line // 16
    assert line > 20


def test_an_engine_that_cannot_begin_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()

    def broken() -> None:
        raise RuntimeError("a page has two owners")

    monkeypatch.setattr(served.engine, "abandon", broken)
    with served.shared.reader() as reader:
        served.ask(reader)
        served.model.before[1] = MemoryError("all is full")
        with pytest.raises(MemoryError, match="all is full"):
            reader.take()
    with (
        served.shared.reader() as reader,
        pytest.raises(RuntimeError, match=r"two owners.*make a new LLM"),
    ):
        served.ask(reader)
        reader.take()


def test_the_thread_ends_with_its_owner() -> None:
    served = Served()
    served.assert_serves()
    [thread] = [one for one in threading.enumerate() if one.name == "kvell-engine"][-1:]
    del served
    gc.collect()
    assert not thread.is_alive()


def test_a_call_to_a_thread_that_has_ended_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "WAIT_SECONDS", 0.01)
    served = Served()
    reader = served.shared.reader()
    served.shared._work.post(served.shared._work.end)
    served.shared._thread.join()
    served.ask(reader)
    with pytest.raises(readers.EngineEnded, match="make a new LLM"):
        reader.take()
    reader.close()


def test_ids_are_of_their_reader(served: Served) -> None:
    with served.shared.reader() as one, served.shared.reader() as other:
        name = served.ask(one)
        other.cancel(RequestId(name))
        assert tokens_of(read(one, name), name) == expected_output(PROMPT, COUNT)
