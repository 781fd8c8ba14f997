"""A first start that goes wrong, while others serve; pauses between dials."""

import asyncio
from collections.abc import Iterator
from itertools import repeat
from typing import cast

import pytest

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.fleet.fleet import Member, MemberCallbacks
from kvell.fleet.instance.instance_process import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    InstanceProcess,
    InstanceStartError,
    Pauses,
    hang_up_after,
    reach,
)
from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.host import Host
from kvell.fleet.started.members import Members
from kvell.fleet.started.supervisor import USER_MUST_CHANGE, RestartPolicy, Supervisor
from kvell.wire.frames import ProtocolError
from tests.front.scenarios import until

PROBLEMS = (
    OSError(24, "too many open files"),
    RuntimeError("can't start new thread"),
    ProtocolError("malformed event"),
    InstanceStartError("it ended"),
    InstanceStartError("it ended", 1),
)

FACTS = InstanceFacts(1, 8, "fake", 64, 1 << 20)


def never(*news: object) -> None:
    raise AssertionError(f"no instance was ready: {news}")


class Listening(Member[Supervisor]):
    def __init__(self) -> None:
        callbacks = MemberCallbacks(never, never, never, self.count, never, never)
        fleet = Members((), FrontLimits(), Host(), callbacks)
        super().__init__("mixed-0", "mixed", fleet)
        self.given_up = 0

    def count(self, _instance_id: str) -> None:
        self.given_up += 1


def supervised(problems: Iterator[Exception], attempts: int) -> tuple[Supervisor, Listening]:
    async def launch() -> InstanceProcess:
        raise next(problems)

    listening = Listening()
    policy = RestartPolicy(0.0, 0.0, attempts)
    return Supervisor("mixed-0", launch, listening, policy, 1.0, 1.0), listening


@pytest.mark.parametrize(
    "problem", PROBLEMS, ids=["descriptors", "threads", "protocol", "lost", "crash"]
)
async def test_a_first_start_that_goes_wrong_is_tried_again(problem: Exception) -> None:
    supervisor, listening = supervised(repeat(problem), attempts=3)
    supervisor.start_soon()
    async with asyncio.timeout(10):
        await supervisor.settled.wait()  # whoever waits for all does not wait for this one
        while not listening.given_up:
            await asyncio.sleep(0)
        assert supervisor.state == "failing" and supervisor.restarts >= 3
        while listening.given_up < 4:  # nor is it given up then
            await asyncio.sleep(0)
    await supervisor.abandon()


async def test_what_the_user_must_change_after_all_ends_it() -> None:
    problems = [*repeat(OSError(24, "too many open files"), 9), InstanceStartError("no", 2)]
    supervisor, _ = supervised(iter(problems), attempts=3)
    supervisor.start_soon()
    async with asyncio.timeout(10):
        while supervisor.state != "failed":
            await asyncio.sleep(0)
    assert supervisor.restarts == 9


async def test_what_the_user_must_change_is_not_tried_again() -> None:
    problem = InstanceStartError("--memory is too little", USER_MUST_CHANGE)
    supervisor, listening = supervised(iter([problem]), attempts=3)
    supervisor.start_soon()
    async with asyncio.timeout(10):
        await supervisor.settled.wait()
    assert (supervisor.state, supervisor.restarts, listening.given_up) == ("failed", 0, 1)


class Welcoming(Listening):
    """Notes the deaths that it is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths: list[InstanceDeath] = []

    def instance_ready(self, facts: InstanceFacts) -> None:
        pass

    def instance_lost(self, death: InstanceDeath) -> None:
        self.deaths.append(death)


class Ended:
    """A process that is ready, and then ends in a way that nobody has thought of."""

    host, pid, kills = "", 1, 0

    @property
    def line(self) -> "Ended":
        """The connection, which fails in its place."""
        return self

    async def wait_ready(self, _deadline_seconds: float) -> InstanceFacts:
        return FACTS

    async def follow(self, _hear: object) -> None:
        raise RuntimeError("a bug")

    async def kill(self) -> int:
        self.kills += 1
        return -9


async def test_a_supervision_that_fails_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """The instance is not left to itself, shown as what it was when somebody last looked."""
    process, listening = Ended(), Welcoming()

    async def launch() -> InstanceProcess:
        return cast(InstanceProcess, process)

    policy = RestartPolicy(0.0, 0.0, 3)
    supervisor = Supervisor("mixed-0", launch, listening, policy, 1.0, 1.0)
    await supervisor.start()
    async with asyncio.timeout(10):
        while not listening.given_up:
            await asyncio.sleep(0)
    assert (supervisor.state, process.kills) == ("failed", 1)
    assert [one.problem for one in listening.deaths] == ["it could not be supervised"]
    assert "a bug" in caplog.text


def test_pauses_grow_up_to_a_bound_and_begin_anew() -> None:
    pauses = Pauses()
    for _ in range(2):
        waited = [pauses.next_seconds() for _ in range(50)]
        assert waited[:3] == [0.0, FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS]
        assert waited == sorted(waited)
        assert waited[-1] == LONGEST_PAUSE_SECONDS
        pauses.reset()


class Dialed:
    """Somebody who answers when the test says so."""

    def __init__(self, error: OSError | None = None) -> None:
        self.answers, self.error = asyncio.Event(), error
        self.hung_up: list[str] = []

    async def dial(self) -> str:
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return "a line"


async def test_what_is_reached_is_not_hung_up() -> None:
    dialed = Dialed()
    dialed.answers.set()
    assert await reach(dialed.dial(), dialed.hung_up.append) == "a line"
    assert not dialed.hung_up


async def test_errors_of_a_dial_are_the_callers() -> None:
    dialed = Dialed(ConnectionRefusedError("nobody"))
    dialed.answers.set()
    with pytest.raises(ConnectionRefusedError):
        await reach(dialed.dial(), dialed.hung_up.append)


@pytest.mark.parametrize("error", [None, ConnectionRefusedError("nobody")])
async def test_what_comes_too_late_is_hung_up(error: OSError | None) -> None:
    dialed = Dialed(error)
    waiting = asyncio.create_task(reach(dialed.dial(), dialed.hung_up.append))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not dialed.hung_up
    dialed.answers.set()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await until(lambda: all(one.done() for one in others))
    await asyncio.sleep(0)
    assert dialed.hung_up == ([] if error else ["a line"])


async def test_a_task_that_was_stopped_reaches_nothing() -> None:
    dialed = Dialed()
    task = asyncio.create_task(dialed.dial())
    hang_up_after(task, dialed.hung_up.append)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert not dialed.hung_up
