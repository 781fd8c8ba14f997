"""Vectors as they travel: bytes of float32 in the message that ends a request."""

import msgspec
import numpy as np
import pytest

from kvell.engine.protocol.codec import decode_command, decode_event, encode_frame
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.engine.protocol.request_spec import RequestSpec
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
    sent = Submit(
        RequestSpec(NAME, b"\1\0\0\0", POOLED, cache_salt="salt", pooling="last", priority=3),
        attempt=1,
    )
    assert decode_command(body(sent)) == sent


def test_an_unknown_pooling_ends_the_connection() -> None:
    sent = Submit(RequestSpec(NAME, b"\1\0\0\0", POOLED, pooling="mean"))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="malformed command"):
        decode_command(body(sent))


def test_messages_of_answers_are_as_they_were() -> None:
    """Both fields have defaults, so that a peer may leave them out."""
    submit, finished = Submit(RequestSpec(NAME, b"\1\0\0\0", POOLED)), Finished(NAME, 0, "length")
    name, fields = msgspec.msgpack.decode(body(submit))
    assert "pooling" not in fields["spec"]
    assert decode_command(msgspec.msgpack.encode([name, fields])) == submit
    name, fields = msgspec.msgpack.decode(body(finished))
    assert not fields.pop("embedding")
    assert decode_event(msgspec.msgpack.encode([name, fields])) == finished
