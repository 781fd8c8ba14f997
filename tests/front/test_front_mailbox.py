"""A mailbox counts output before it keeps it, and keeps none that has no room."""

import asyncio

import pytest

from kvell.engine.protocol.logprobs import TokenLogprobs
from kvell.errors import TryLater
from kvell.front.request_log import Mailbox

LIKELY = TokenLogprobs(-1.0, 1, ((1, -1.0), (2, -2.0)))


class Room:
    """A room for a number of tokens and log probabilities."""

    def __init__(self, left: int) -> None:
        self.left = left

    def grow(self, tokens: int, numbers: int) -> None:
        if tokens + numbers > self.left:
            raise TryLater("no room", bound="answer_bytes")
        self.left -= tokens + numbers

    def add_text(self, text: str) -> None:
        raise AssertionError("texts are not the mailbox's")


async def test_output_without_room_is_dropped_and_the_reader_is_told_once_it_reads() -> None:
    full: list[str] = []
    room = Room(11)
    mailbox = Mailbox(room, lambda: full.append("full"))
    mailbox.put((1, 2), (LIKELY, LIKELY))
    assert room.left == 11 - 2 - 2 * 3
    assert (await mailbox.take()).token_ids == (1, 2)
    reading = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.put((3,), (LIKELY,))
    with pytest.raises(TryLater, match="no room"):
        await reading
    mailbox.put((4,))
    assert full == ["full"] and room.left == 3
    with pytest.raises(TryLater):
        await mailbox.take()
