"""The answering side of a session over a socket that blocks."""

from kvell.wire.blocking import BlockingSocket, within
from kvell.wire.frames import HEADER_BYTES
from kvell.wire.greeting import GREETING_BYTES, GREETING_SECONDS, Greeting
from kvell.wire.session import Purpose, ServerHandshake


def answer_session(
    channel: BlockingSocket,
    told: Greeting,
    secret: bytes,
    purposes: tuple[Purpose, ...] = ("messages", "pages"),
) -> tuple[Purpose, Greeting]:
    """Answer who connects, one frame after the other; returns what it wants and who it is."""
    answering, look = ServerHandshake(told, secret, purposes), within(GREETING_SECONDS)
    while answering.met is None:
        header = bytearray(HEADER_BYTES)
        channel.receive([header], look)
        said = answering.hear(bytes(header))
        body = bytearray(min(int.from_bytes(header[:4], "little"), GREETING_BYTES))
        channel.receive([body], look)
        said += answering.hear(bytes(body))
        channel.send([said], look)
    return answering.met
