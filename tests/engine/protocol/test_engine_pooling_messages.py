"""Vectors as they travel: bytes of float32 in the message that ends a request."""

import msgspec
import numpy as np
import pytest

from kvell.engine.protocol.codec import decode_command, decode_event, encode_frame
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.vocabulary import RequestId
from kvell.wire.frames import HEADER_BYTES, ProtocolError

NAME = RequestId("a")


def body(message: Submit | Finished) -> bytes:
    return encode_frame(message)[HEADER_BYTES:]


@pytest.mark.parametrize("size", [1, 3, 4096])
def test_a_vector_arrives_to_the_last_bit(size: int) -> None:
    drawn = np.random.default_rng(size).normal(size=size).astype(np.float32)
    sent = Finished(NAME, 2, "stop", 7, 0, 5, embedding=drawn.astype("<f4").tobytes())
    told = decode_event(body(sent))
    assert told == sent and isinstance(told, Finished)
    assert np.array_equal(vector_of(told.embedding), drawn)
    assert len(body(sent)) < 4 * size + 400


def test_a_request_arrives_with_its_pooling() -> None:
    sent = Submit(NAME, b"\1\0\0\0", POOLED, "salt", 1, pooling="last", priority=3)
    assert decode_command(body(sent)) == sent


def test_an_unknown_pooling_ends_the_connection() -> None:
    sent = Submit(NAME, b"\1\0\0\0", POOLED, pooling="mean")  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="malformed command"):
        decode_command(body(sent))


def test_messages_of_answers_are_as_they_were() -> None:
    """Both fields have defaults, so that a peer may leave them out."""
    for message, field in (
        (Submit(NAME, b"\1\0\0\0", POOLED), "pooling"),
        (Finished(NAME, 0, "length", 1, 2), "embedding"),
    ):
        name, fields = msgspec.msgpack.decode(body(message))
        assert not fields.pop(field)
        old = msgspec.msgpack.encode([name, fields])
        decode = decode_command if isinstance(message, Submit) else decode_event
        assert decode(old) == message
