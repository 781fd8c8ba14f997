"""Batches reach subscribers in order, and those they missed again."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvell.engine.protocol.notices import BlocksRemoved, IndexNotice
from kvell.errors import ChangeSomething
from kvell.front.events import publisher as publisher_module
from kvell.front.events.events_config import KvEventsConfig
from kvell.front.events.publisher import END_OF_REPLAY, EventsPublisher

PATIENCE_SECONDS = 20.0


def removed(block: int) -> IndexNotice:
    return IndexNotice(0, (BlocksRemoved(0, (block,)),))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_SECONDS))


async def subscribed(
    context: zmq.asyncio.Context, publisher: EventsPublisher, topic: str
) -> zmq.asyncio.Socket:
    """A subscriber that is known to be heard: it has received a first batch."""
    socket = context.socket(zmq.SUB)
    socket.connect(publisher.endpoint)
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
    while not await socket.poll(10):
        publisher.on_notice("mixed-0", removed(1))
    while await socket.poll(50):
        await socket.recv_multipart()
    return socket


async def next_batch(socket: zmq.asyncio.Socket) -> tuple[bytes, int, list[Any]]:
    topic, number, batch = await socket.recv_multipart()
    return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)


async def test_subscribers_hear_of_each_instance_in_order() -> None:
    context = zmq.asyncio.Context()
    config = KvEventsConfig("tcp://127.0.0.1:*", topic="kv@pod")
    async with EventsPublisher(config) as publisher:
        socket = await subscribed(context, publisher, "kv@")
        publisher.on_notice("mixed-0", removed(7))
        publisher.on_notice("mixed-1", removed(8))
        publisher.lost("mixed-0")
        publisher.lost("mixed-5")  # never said anything
        publisher.on_notice("mixed-0", removed(9))
        batches = [await next_batch(socket) for _ in range(4)]
        socket.close()
    context.destroy(linger=0)
    topics, numbers, told = zip(*batches, strict=True)
    assert set(topics) == {b"kv@pod"}
    assert list(numbers) == list(range(numbers[0], numbers[0] + 4))
    kinds = [(batch[2], batch[1][0]["type"]) for batch in told]
    expected = ["BlockRemoved", "BlockRemoved", "AllBlocksCleared", "BlockRemoved"]
    assert kinds == list(zip([0, 1, 0, 0], expected, strict=True))


async def test_missed_batches_are_replayed_as_far_as_they_are_kept(tmp_path: Path) -> None:
    context = zmq.asyncio.Context()
    replay = f"ipc://{tmp_path}/replay"
    config = KvEventsConfig("tcp://127.0.0.1:*", replay, buffer_steps=4)
    async with EventsPublisher(config) as publisher:
        for block in range(10):
            publisher.on_notice("mixed-0", removed(block))
        client = context.socket(zmq.DEALER)
        client.connect(replay)
        await client.send_multipart([b"", b"no request"])  # is passed over
        told: dict[int, list[tuple[int, int]]] = {}
        for start in (8, 0):
            told[start] = []
            await client.send_multipart([b"", start.to_bytes(8, "big")])
            while True:
                _, number, batch = await client.recv_multipart()
                at = int.from_bytes(number, "big", signed=True)
                if at < 0:
                    break
                (event,) = msgspec.msgpack.decode(batch)[1]
                told[start].append((at, event["block_hashes"][0]))
        client.close()
    context.destroy(linger=0)
    assert told == {8: [(8, 8), (9, 9)], 0: [(6, 6), (7, 7), (8, 8), (9, 9)]}


class FailsOnce(deque[Any]):
    """Batches that cannot be read the first time."""

    has_failed = False

    def __iter__(self) -> Iterator[Any]:
        if not self.has_failed:
            self.has_failed = True
            raise ZeroDivisionError("a mistake of this program")
        return super().__iter__()


async def test_a_replay_that_fails_ends_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "deque", FailsOnce)
    context = zmq.asyncio.Context()
    replay = f"ipc://{tmp_path}/replay"
    async with EventsPublisher(KvEventsConfig("tcp://127.0.0.1:*", replay)):
        client = context.socket(zmq.DEALER)
        client.connect(replay)
        for _ in range(2):
            await client.send_multipart([b"", bytes(8)])
        assert (await client.recv_multipart())[1] == END_OF_REPLAY
        client.close()
    context.destroy()
    assert [record.getMessage() for record in caplog.records] == ["a replay of KV events failed"]


async def test_nobody_needs_to_listen(tmp_path: Path) -> None:
    config = KvEventsConfig(f"ipc://{tmp_path}/nobody", hwm=1)
    async with EventsPublisher(config) as publisher:
        for block in range(100):
            publisher.on_notice("mixed-0", removed(block))


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
async def test_an_address_in_use_is_named(field: str, tmp_path: Path) -> None:
    async with EventsPublisher(KvEventsConfig("tcp://127.0.0.1:*")) as first:
        free = f"ipc://{tmp_path}/free"
        taken = KvEventsConfig(first.endpoint.replace("127.0.0.1", "*"), None)
        if field == "replay_endpoint":
            taken = KvEventsConfig(free, first.endpoint)
        with pytest.raises(ChangeSomething, match="cannot be bound"):
            async with EventsPublisher(taken):
                pass
