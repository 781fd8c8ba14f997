"""Credits, shares and ends of fronts: against a model, with an engine whose requests end late."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvell.engine.protocol.messages import (
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Introduce,
    KeepAlive,
    Lead,
    Led,
    Ready,
    Submit,
    Tokens,
)
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.serving.gate import CommandGate, front_of, lone_owner
from kvell.testing.instance import FakeEngine
from kvell.vocabulary import FinishReason, RequestId
from tests.depth import machine

CREDITS = 3
FRONTS = ("a", "b")


class LateEngine(FakeEngine):
    """What is cancelled ends with the next step, as where a step computes it just now."""

    def __init__(self) -> None:
        super().__init__(credits=CREDITS)
        self.has: dict[RequestId, int] = {}
        self.cancelled: set[RequestId] = set()
        self.arrives: list[RequestId] = []
        self.ended: list[Event] = []

    def has_work(self) -> bool:
        return bool(self.has or self.arrives)

    def has_requests(self) -> bool:
        return bool(self.has or self.arrives)

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Submit):
            assert command.request_id not in self.has, "the engine has a request of this id"
            self.has[command.request_id] = command.attempt
        elif isinstance(command, Cancel) and command.request_id in self.has:
            self.cancelled.add(command.request_id)
        return []

    def step(self) -> list[Event]:
        for request_id in self.arrives:
            self.has.setdefault(request_id, 0)
        self.arrives = []
        told: list[Event] = []
        for request_id, attempt in list(self.has.items()):
            if request_id in self.cancelled:
                told.append(self.end(request_id, "cancelled"))
            else:
                told.append(Tokens(request_id, attempt, 0, (1,)))
        return told

    def woken(self) -> list[Event]:
        ended, self.ended = self.ended, []
        return ended

    def end(self, request_id: RequestId, reason: FinishReason) -> Finished:
        self.cancelled.discard(request_id)
        return Finished(request_id, self.has.pop(request_id), reason)


def submit(front: str, number: int, attempt: int = 0, tokens: int = 5) -> Submit:
    name = RequestId(f"{front}:{number}")
    return Submit(
        RequestSpec(name, bytes(4 * tokens), SamplingParams(max_tokens=9)), attempt=attempt
    )


class Shares(RuleBasedStateMachine):
    """Two fronts submit, go, and come back with the same requests; the engine ends what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = LateEngine()
        self.gate = CommandGate(self.engine, front_of)
        self.live: dict[RequestId, int] = {}
        """Requests that their front waits for, and their attempts."""
        self.attempt = 0

    def took(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Finished) and self.live.get(event.request_id) == event.attempt:
                del self.live[event.request_id]
        return events

    @rule(front=st.sampled_from(FRONTS), number=st.integers(0, 4))
    def submits(self, front: str, number: int) -> None:
        self.attempt += 1
        command = submit(front, number, self.attempt)
        of_front = [one for one in self.live if front_of(one) == front]
        is_full = len(of_front) >= CREDITS
        was_live = command.request_id in self.live
        waits = command.request_id in self.engine.cancelled
        told = self.gate.accept(command, front)
        refused = [one for one in told if isinstance(one, Finished) and one.reason == "refused"]
        if was_live:
            assert refused
        elif waits:
            self.live[command.request_id] = self.attempt
            assert not told
        elif not refused:
            self.live[command.request_id] = self.attempt
            assert not is_full
        else:
            assert "credits" in refused[0].message

    @rule(front=st.sampled_from(FRONTS))
    def goes(self, front: str) -> None:
        self.took(self.gate.cancel_of(front))
        self.live = {one: attempt for one, attempt in self.live.items() if front_of(one) != front}

    @rule()
    def steps(self) -> None:
        if self.gate.has_work():
            self.took(self.gate.advance())

    @precondition(lambda self: set(self.engine.has) - self.engine.cancelled)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        running = sorted(set(self.engine.has) - self.engine.cancelled)
        name = data.draw(st.sampled_from(running))
        self.engine.ended = [self.engine.end(name, "length")]
        self.took(self.gate.woken())

    @rule(front=st.sampled_from(FRONTS), number=st.integers(5, 6))
    def comes_from_another_instance(self, front: str, number: int) -> None:
        name = RequestId(f"{front}:{number}")
        if name not in self.live and name not in self.engine.has:
            self.engine.arrives.append(name)
            self.took(self.gate.advance())
            self.live[name] = 0

    @invariant()
    def nothing_runs_that_nobody_waits_for(self) -> None:
        for name in set(self.engine.has) - self.engine.cancelled:
            assert name in self.live

    @invariant()
    def others_are_counted(self) -> None:
        for front in FRONTS:
            _, requests = self.gate.others(front)
            others = {one for one in self.engine.has if front_of(one) != front}
            assert requests == len(others)

    def teardown(self) -> None:
        self.gate.accept(Drain(), "a")
        for front in FRONTS:
            self.gate.cancel_of(front)
        told: list[Event] = []
        while self.gate.has_work():
            told += self.gate.advance()
        assert self.gate.drained or not told
        assert not self.engine.has
        assert self.gate.others("nobody") == (0, 0)


TestShares = Shares.TestCase
TestShares.settings = machine(40, weight=0.4)


def test_prompts_of_others_count_until_their_first_token() -> None:
    engine = LateEngine()
    gate = CommandGate(engine, front_of)
    gate.accept(submit("a", 1, tokens=7), "a")
    gate.accept(submit("a", 2, tokens=2), "a")
    assert gate.others("b") == (9, 2)
    assert gate.others("a") == (0, 0)
    gate.advance()
    assert gate.others("b") == (0, 2)


def test_a_request_in_anothers_name_is_refused() -> None:
    gate = CommandGate(LateEngine(), front_of)
    [refused] = gate.accept(submit("a", 1), "b")
    assert isinstance(refused, Finished)
    assert "must begin with b:" in refused.message


def test_each_front_has_the_credits_for_itself() -> None:
    gate = CommandGate(LateEngine(), front_of)
    for front in FRONTS:
        for number in range(CREDITS):
            assert gate.accept(submit(front, number), front) == []
        [refused] = gate.accept(submit(front, 9), front)
        assert isinstance(refused, Finished)
        assert "credits" in refused.message


def test_a_single_front_may_have_any_ids() -> None:
    gate = CommandGate(FakeEngine(), lone_owner)
    assert isinstance(gate.ready, Ready)
    assert gate.accept(KeepAlive()) == []
    gate.accept(Submit(RequestSpec(RequestId("x:y"), bytes(4), SamplingParams(max_tokens=1))))
    *_, finished = gate.advance()
    assert isinstance(finished, Finished)
    gate.accept(Drain())
    assert gate.drained


def test_drained_is_told_once_the_last_front_has_nothing() -> None:
    engine = LateEngine()
    gate = CommandGate(engine, front_of)
    gate.accept(submit("a", 1), "a")
    assert gate.accept(Drain(), "manager") == []
    gate.cancel_of("a")
    assert not gate.drained
    told = gate.advance()
    assert isinstance(told[-1], Drained)
    [refused] = gate.accept(submit("b", 1), "b")
    assert isinstance(refused, Finished)
    assert refused.not_taken == "draining"


def test_orders_of_an_older_manager_are_refused_and_it_hears_why() -> None:
    gate = CommandGate(FakeEngine(), front_of)
    assert gate.accept(Lead(7), "manager-old") == [Led(7)]
    assert gate.accept(Lead(8), "manager-new") == [Led(8)]
    for order in (Lead(7), Drain(7), Introduce({"mixed-0": "tcp://10.0.0.1:1"}, 7)):
        assert gate.accept(order, "manager-old") == [Led(8)]
    assert gate.accept(Lead(8), "manager-third") == [Led(9)], "the first of an epoch has it"
    assert not gate.drained
    assert gate.accept(Drain(8), "manager-new") == [Drained()]


def test_a_process_that_is_told_to_end_drains_whoever_leads() -> None:
    gate = CommandGate(FakeEngine(), front_of)
    gate.accept(Lead(8), "manager-new")
    assert gate.accept(Drain()) == [Drained()]


def test_where_others_handed_requests_over_one_more_is_not_taken_just_now() -> None:
    engine = LateEngine()
    gate = CommandGate(engine, front_of)
    engine.arrives = [RequestId("a:9")]
    gate.advance()
    for number in range(CREDITS - 1):
        assert gate.accept(submit("a", number), "a") == []
    [refused] = gate.accept(submit("a", CREDITS), "a")
    assert isinstance(refused, Finished)
    assert (refused.not_taken, refused.try_later) == ("full", True)
