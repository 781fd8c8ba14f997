"""Lanes: one thread each, in order, within a number of bytes; short texts pass long ones."""

import asyncio
import threading
from functools import partial

import pytest

from kvell.engine.protocol.request_spec import SentTensor
from kvell.errors import TryLater
from kvell.server.text import lanes as held_tensors
from kvell.server.text.lanes import HeldTensors, Lane, TextWork
from kvell.server.text.text_bounds import SHORT_BYTES


def num_bytes(lane: Lane) -> int:
    """Return the number of bytes that a lane has taken."""
    return lane._bytes.total


async def test_a_short_text_does_not_wait_for_a_long_one() -> None:
    work, go_on = TextWork(), threading.Event()
    long = asyncio.create_task(work.run(SHORT_BYTES + 1, go_on.wait))
    assert await work.run(SHORT_BYTES, lambda: "short") == "short"
    assert not long.done()
    go_on.set()
    assert await long
    work.close()


async def test_long_texts_are_worked_on_one_by_one_in_their_order() -> None:
    work, order = TextWork(), list[int]()
    long = [work.run(SHORT_BYTES + 9 - n, partial(order.append, n)) for n in range(4)]
    await asyncio.gather(*long)
    assert order == [0, 1, 2, 3]
    work.close()


async def test_too_many_bytes_are_refused_by_name_and_an_empty_lane_takes_anything() -> None:
    lane, go_on = Lane("test", "text_bytes", 10, trims=False), threading.Event()
    first = asyncio.create_task(lane.run(100, go_on.wait))
    await asyncio.sleep(0)
    with pytest.raises(TryLater) as refused:
        await lane.run(1, lambda: None)
    assert refused.value.bound == "text_bytes"
    go_on.set()
    await first
    assert await lane.run(1, lambda: 7) == 7
    await asyncio.sleep(0)
    assert num_bytes(lane) == 0
    lane.close()


async def test_whoever_is_cancelled_leaves_the_line_with_its_bytes() -> None:
    lane, go_on = Lane("test", "text_bytes", 100, trims=False), threading.Event()
    read: list[str] = []
    running = asyncio.create_task(lane.run(10, go_on.wait))
    waiting = asyncio.create_task(lane.run(90, lambda: read.append("waiting")))
    await asyncio.sleep(0)
    assert num_bytes(lane) == 100
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert num_bytes(lane) == 10
    last = asyncio.create_task(lane.run(90, lambda: read.append("last")))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not last.done(), "the thread is still at work for nobody"
    go_on.set()
    await last
    assert read == ["last"]
    lane.close()


async def test_work_that_fails_leaves_the_lane_to_the_next() -> None:
    lane = Lane("test", "image_pixels", 10, trims=True)
    with pytest.raises(ZeroDivisionError):
        await lane.run(10, lambda: 1 // 0)
    assert await lane.run(10, lambda: 1) == 1
    lane.close()


def test_tensors_count_until_nobody_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_tensors, "MOST_HELD_BYTES", 8)
    held = HeldTensors()
    kept = [SentTensor("a", "uint8", (5,), b"12345"), SentTensor("b", "uint8", (3,), b"123")]
    held.check("a")
    held.hold("a", kept)
    with pytest.raises(TryLater) as refused:
        held.check("a")
    assert refused.value.bound == "image_pixels"
    held.check("b")
    kept.pop()
    assert held.held_bytes() == {"a": 5}
    held.check("a")


async def test_tenants_take_turns_and_each_is_in_order() -> None:
    """Whoever sends much waits behind itself."""
    work, go_on, order = TextWork(), threading.Event(), list[str]()
    red, blue = work.of("red"), work.of("blue")
    first = asyncio.create_task(red.run(10, go_on.wait))
    await asyncio.sleep(0)
    names = [(red, f"red-{n}") for n in range(5)] + [(blue, f"blue-{n}") for n in range(2)]
    waiting = [asyncio.create_task(one.run(10, partial(order.append, name))) for one, name in names]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, *waiting)
    assert order.index("blue-0") < order.index("red-1")
    assert order.index("blue-1") < order.index("red-2")
    for color in ("red", "blue"):
        own = [one for one in order if one.startswith(color)]
        assert own == sorted(own)
    work.close()


async def test_a_tenant_that_fills_the_lane_keeps_no_other_out() -> None:
    lane, go_on = Lane("test", "text_bytes", 100, trims=False), threading.Event()
    full = [asyncio.create_task(lane.run(25, go_on.wait, "red")) for _ in range(4)]
    await asyncio.sleep(0)
    assert num_bytes(lane) == 100
    with pytest.raises(TryLater):
        await lane.run(1, lambda: None, "red")
    late = asyncio.create_task(lane.run(90, lambda: "blue", "blue"))
    await asyncio.sleep(0)
    with pytest.raises(TryLater):
        await lane.run(11, lambda: None, "blue")
    with pytest.raises(TryLater):
        await lane.run(26, lambda: None, "green")  # all together have no room for it
    newcomer = asyncio.create_task(lane.run(11, lambda: "green", "green"))  # a reserved part
    go_on.set()
    assert (await late, await newcomer) == ("blue", "green")
    await asyncio.gather(*full)
    assert num_bytes(lane) == 0
    lane.close()


async def test_a_closed_lane_refuses_work_and_counts_none() -> None:
    lane = Lane("test", "text_bytes", 100, trims=False)
    lane.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            await lane.run(60, lambda: None)
    assert num_bytes(lane) == 0


async def test_texts_of_no_bytes_are_worked_on_like_others() -> None:
    lane = Lane("test", "text_bytes", 100, trims=False)
    made = [lane.run(size, partial(str, size)) for size in (0, 10, 0, 0)]
    assert await asyncio.gather(*made) == ["0", "10", "0", "0"]
    assert num_bytes(lane) == 0
    lane.close()


async def test_whoever_waits_when_a_lane_closes_is_told() -> None:
    lane, go_on = Lane("test", "text_bytes", 10_000, trims=False), threading.Event()
    running = asyncio.create_task(lane.run(1, go_on.wait))
    waiting = [asyncio.create_task(lane.run(1, lambda: None)) for _ in range(3000)]
    await asyncio.sleep(0)
    lane.close()
    go_on.set()
    assert await running
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(one) for one in told} == {RuntimeError}
