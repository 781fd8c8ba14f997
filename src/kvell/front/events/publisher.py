"""The publisher of KV events over ZeroMQ, compatible with vLLM's publisher.

A message has three frames: topic, number of the batch (8 bytes, big-endian), batch.  A subscriber
that misses batches sends the first number that it wants to the replay endpoint, and gets ``[number,
batch]`` for each that is kept, then a number of -1.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

from kvell.engine.protocol.notices import IndexNotice
from kvell.errors import ChangeSomething
from kvell.front.events.events_config import DEFAULT_ENDPOINT, FIELD, KvEventsConfig
from kvell.front.events.kv_events import AllBlocksCleared, Event, KVEventBatch, events_of

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LINGER_MILLISECONDS = 500

logger = logging.getLogger(__name__)


class EventsPublisher:
    """``async with EventsPublisher(config) as publisher``, in the loop that calls its methods.

    Instances are numbered as they appear.  A lost instance has nothing cached any more.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._numbers: dict[str, int] = {}
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._replays: asyncio.Task[None] | None = None
        # A plain socket: sending never waits, since a slow subscriber misses batches instead.
        self._socket = zmq.Socket(self._context, zmq.PUB)

    async def __aenter__(self) -> Self:
        """Open the endpoints.

        :raises ChangeSomething: when one cannot be used.
        """
        config = self._config
        self._socket.linger = LINGER_MILLISECONDS
        self._socket.sndhwm = config.hwm
        try:
            _open(self._socket, config.endpoint or DEFAULT_ENDPOINT, is_bound=config.is_bound)
            if config.replay_endpoint is not None:
                router = self._context.socket(zmq.ROUTER)
                router.linger = LINGER_MILLISECONDS
                self._replays = asyncio.create_task(self._replay(router))
                _open(router, config.replay_endpoint, is_bound=True)
        except ChangeSomething:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._replays is not None:
            self._replays.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replays
        self._socket.close()
        self._context.destroy()

    @property
    def endpoint(self) -> str:
        """The address as it was opened, with the free port that was chosen if none was given."""
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        return address.decode().rstrip("\0")

    def on_notice(self, instance_id: str, notice: IndexNotice) -> None:
        if events := events_of(notice):
            self._publish(instance_id, events)

    def lost(self, instance_id: str) -> None:
        if instance_id in self._numbers:
            self._publish(instance_id, [AllBlocksCleared()])

    def _publish(self, instance_id: str, events: list[Event]) -> None:
        number = self._numbers.setdefault(instance_id, len(self._numbers))
        batch = self._encoder.encode(KVEventBatch(time.time(), events, number))
        self._kept.append((self._next, batch))
        frames = [self._config.topic.encode(), self._next.to_bytes(8, "big"), batch]
        self._next += 1
        with contextlib.suppress(zmq.Again):  # the endpoint that we connect to has no listener
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frames = await router.recv_multipart()
                try:
                    await self._send_again(router, frames)
                except Exception:  # affects one request: others are answered
                    logger.exception("a replay of KV events failed")
        finally:
            router.close()

    async def _send_again(self, router: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a request of this protocol
        client = frames[0]
        start = int.from_bytes(frames[2], "big")
        for number, batch in [entry for entry in self._kept if entry[0] >= start]:
            await router.send_multipart([client, b"", number.to_bytes(8, "big"), batch])
        await router.send_multipart([client, b"", END_OF_REPLAY, b""])


def _open(socket: "zmq.Socket[Any]", address: str, *, is_bound: bool) -> None:
    try:
        if is_bound:
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        problem = f"cannot be {'bound' if is_bound else 'connected to'} ({error})"
        raise ChangeSomething(FIELD, address, problem, "choose another address") from error
