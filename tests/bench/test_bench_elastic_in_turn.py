"""Sides in turn: each has its own clock, steps alternate, and early endings raise."""

import time

import pytest

from bench.elastic.in_turn import SideClock, alternated, tokens_of
from kvell.engine.protocol.messages import Finished, Tokens
from kvell.vocabulary import RequestId


class TestSideClock:
    def test_stands_still_while_others_compute(self) -> None:
        clock = SideClock()
        clock.start()
        time.sleep(0.002)
        clock.stop()
        passed = clock.now_seconds()
        assert passed >= 0.002
        time.sleep(0.002)
        assert clock.now_seconds() == passed

    def test_waits_forward_only(self) -> None:
        clock = SideClock()
        clock.wait_until(3.0)
        clock.wait_until(2.0)
        assert clock.now_seconds() == 3.0


class Counted:
    """A side with a number of steps, which notes when it runs one."""

    def __init__(self, name: str, steps: int, log: list[str]) -> None:
        self._name, self._left, self._log = name, steps, log

    @property
    def has_work(self) -> bool:
        return self._left > 0

    def step(self) -> None:
        self._left -= 1
        self._log.append(self._name)


def test_sides_take_turns_until_the_last_is_done() -> None:
    log: list[str] = []
    alternated([Counted("a", 2, log), Counted("b", 4, log)])
    assert log == ["a", "b", "a", "b", "b", "b"]


class TestTokens:
    NEW = Tokens(RequestId("a"), 0, 0, (7,))

    def test_come_from_the_events_of_a_step(self) -> None:
        ended = Finished(RequestId("a"), 0, "length")
        assert list(tokens_of([self.NEW, ended, self.NEW])) == [self.NEW, self.NEW]

    def test_a_request_that_was_given_up_is_an_error(self) -> None:
        ended = Finished(RequestId("a"), 0, "refused", message="no room")
        with pytest.raises(RuntimeError, match="refused: no room"):
            list(tokens_of([self.NEW, ended]))
