"""An answer for many: made once, and again only when it is time."""

import asyncio

import pytest

from kvell.clock import VirtualClock
from kvell.server.map.recorder import LatestAnswer


class Counting:
    """Makes numbered answers, and may be held up or fail."""

    def __init__(self, every_seconds: float = 0.2) -> None:
        self.clock = VirtualClock()
        self.made = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.failure: Exception | None = None
        self.answers = LatestAnswer(self._make, self.clock.now_seconds, every_seconds)

    async def _make(self) -> bytes:
        self.made += 1
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        return str(self.made).encode()


async def test_a_fresh_answer_is_kept_and_an_old_one_made_anew() -> None:
    counting = Counting()
    assert await counting.answers.latest() == b"1"
    counting.clock.advance(0.19)
    assert await counting.answers.latest() == b"1"
    counting.clock.advance(0.02)
    assert await counting.answers.latest() == b"2"


async def test_many_viewers_cost_no_more_than_one() -> None:
    counting = Counting()
    counting.go_on.clear()
    viewers = [asyncio.create_task(counting.answers.latest()) for _ in range(50)]
    await asyncio.sleep(0)
    counting.go_on.set()
    assert await asyncio.gather(*viewers) == [b"1"] * 50
    assert counting.made == 1


async def test_a_second_of_viewers_makes_five_answers_at_most() -> None:
    counting = Counting()
    for _ in range(100):
        await counting.answers.latest()
        counting.clock.advance(0.01)
    assert counting.made <= 5


async def test_a_viewer_that_leaves_takes_nobody_with_it() -> None:
    counting = Counting()
    counting.go_on.clear()
    first, second = (asyncio.create_task(counting.answers.latest()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    counting.go_on.set()
    assert await second == b"2"


async def test_a_failure_is_not_kept() -> None:
    counting = Counting()
    counting.failure = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        await counting.answers.latest()
    counting.failure = None
    assert await counting.answers.latest() == b"2"


async def test_without_an_interval_viewers_share_what_is_begun_after_they_came() -> None:
    counting = Counting(0.0)
    counting.go_on.clear()
    early = asyncio.create_task(counting.answers.latest())
    await asyncio.sleep(0)
    late = [asyncio.create_task(counting.answers.latest()) for _ in range(50)]
    await asyncio.sleep(0)
    counting.go_on.set()
    assert await early == b"1"
    assert await asyncio.gather(*late) == [b"2"] * 50
    assert await counting.answers.latest() == b"3"


async def test_a_failed_answer_is_shared_by_nobody() -> None:
    counting = Counting(0.0)
    counting.go_on.clear()
    viewers = [asyncio.create_task(counting.answers.latest()) for _ in range(3)]
    await asyncio.sleep(0)
    counting.failure = RuntimeError("broken")
    counting.go_on.set()
    results = await asyncio.gather(*viewers, return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError] * 3
