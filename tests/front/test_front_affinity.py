"""The front's place: off the first processor while an instance serves, and never inherited."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from kvell.fleet.started.front_limits import FrontLimits
from kvell.fleet.started.supervisor import RestartPolicy
from kvell.front.front import Affinity, Front

CommandFactory = Callable[..., list[str]]


def in_a_thread(work: Callable[[], None]) -> None:
    """Places are a thread's: that of the tests keeps its own."""
    problems: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


@pytest.fixture
def processors() -> frozenset[int]:
    found = frozenset(os.sched_getaffinity(0))
    if len(found) < 2:
        pytest.skip("one processor is nobody's to leave")
    return found


def test_it_is_all_but_the_first_and_is_given_back(processors: frozenset[int]) -> None:
    def work() -> None:
        place = Affinity()
        place.take()
        assert os.sched_getaffinity(0) == processors - {min(processors)}
        place.give_back()
        assert os.sched_getaffinity(0) == processors

    in_a_thread(work)


def test_whoever_has_one_processor_keeps_it(processors: frozenset[int]) -> None:
    def work() -> None:
        os.sched_setaffinity(0, {max(processors)})
        place = Affinity()
        for change in (place.take, place.give_back):
            change()
            assert os.sched_getaffinity(0) == {max(processors)}

    in_a_thread(work)


def test_processors_that_are_gone_are_no_problem(
    processors: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Affinity()

    def refuse(_pid: int, _mask: frozenset[int]) -> None:
        raise OSError("invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    place.take()
    place.give_back()


def test_where_the_system_has_no_places_nothing_is_asked_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "sched_setaffinity", lambda *args: asked.append(args))
    place = Affinity()
    place.take()
    place.give_back()
    assert asked == []


def test_an_instance_that_is_started_again_has_all_processors(
    processors: frozenset[int], instance_command: CommandFactory
) -> None:
    quick = FrontLimits(drain_seconds=5, restart=RestartPolicy(0.01, 0.05, 3))

    async def scenario() -> None:
        async with Front(instance_command(), limits=quick, place=Affinity()) as front:
            for restarts in range(2):
                assert os.sched_getaffinity(0) == processors - {min(processors)}
                pid = front.instances()[0][0].pid
                assert pid is not None
                assert os.sched_getaffinity(pid) == processors
                os.kill(pid, 9)
                while front.instances()[0][0].restarts == restarts or front.state != "serving":
                    await asyncio.sleep(0.005)

    in_a_thread(lambda: asyncio.run(asyncio.wait_for(scenario(), 60)))
