"""The codec: every message survives; resubmitted output goes on where it stopped."""

import re
import zlib
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from kvell.cost.prices import ExecCosts
from kvell.engine.protocol.codec import decode_command, decode_event, encode_frame
from kvell.engine.protocol.messages import (
    AskStats,
    Cancel,
    Command,
    Drain,
    Drained,
    Event,
    Finished,
    Heartbeat,
    OtherFronts,
    Ready,
    ResetPrefixCache,
    Submit,
    Tokens,
)
from kvell.engine.protocol.notices import BlocksRemoved, BlocksStored, IndexNotice, WatchIndex
from kvell.engine.protocol.pages import (
    AskLargePage,
    AskPages,
    LargePage,
    Miss,
    MissReason,
    PageGroup,
    PageOwner,
    Pages,
)
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.pooling import POOLED, vector_of
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.engine.protocol.statistics import GroupStats, InstanceFacts, LoadStats, Stats
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.serving.lone import LocalInstance
from kvell.testing.instance import FakeEngine
from kvell.vocabulary import RequestId
from kvell.wire import frames
from kvell.wire.frames import HEADER_BYTES, FrameReader, ProtocolError, frame

LENGTH_AND_ITS_CHECKSUM_BYTES = 8

naturals = st.integers(0, 2**62)
texts = st.text(max_size=20)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 1000),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.none() | st.integers(0, MAX_SEED),
    will_return=st.none() | st.booleans(),
    max_tokens=st.none() | st.integers(1, 2**40),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
)
counts = st.dictionaries(texts, naturals, max_size=3)
groups = st.builds(GroupStats, texts, naturals, naturals, naturals, naturals)
page_groups = st.builds(PageGroup, texts, texts, naturals, naturals, naturals, naturals)
page_owners = st.builds(PageOwner, texts.map(RequestId), naturals, naturals, naturals)
misses = st.builds(
    Miss,
    texts.map(RequestId),
    *[naturals] * 5,
    st.sampled_from(get_args(MissReason)),
    st.lists(texts, max_size=2).map(tuple),
)
hashes = st.lists(st.integers(1, 2**64 - 1), max_size=3).map(tuple)
index_changes = st.one_of(
    st.builds(
        BlocksStored, naturals, texts, naturals, hashes, st.binary(max_size=16), naturals, naturals
    ),
    st.builds(BlocksRemoved, naturals, hashes),
)
entries = st.lists(
    st.builds(RequestPlacementEntry, texts.map(RequestId), texts, naturals, local=st.booleans()),
    max_size=2,
).map(tuple)
seconds = st.floats(0, 1)
prices = st.builds(ExecCosts, seconds, natn_seconds=st.lists(seconds, max_size=3).map(tuple))
facts = st.builds(
    InstanceFacts,
    *(naturals, naturals, texts, naturals, naturals),
    memory=counts,
    host=texts,
    prices=prices,
)
loads = st.builds(LoadStats, *[naturals] * 7, placements=entries, longest=entries)
commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(
        Submit,
        st.builds(
            RequestSpec,
            texts.map(RequestId),
            st.binary(max_size=16).map(lambda part: 4 * part),
            samplings,
            texts,
        ),
        naturals,
    ),
    st.builds(Cancel, texts.map(RequestId)),
    st.builds(AskStats),
    st.builds(ResetPrefixCache),
    st.builds(AskPages),
    st.builds(AskLargePage, naturals),
    st.builds(WatchIndex),
    st.builds(Drain),
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, naturals, facts),
    st.builds(Tokens, texts.map(RequestId), naturals, naturals, ids),
    st.builds(
        Finished,
        texts.map(RequestId),
        naturals,
        st.sampled_from(["stop", "length", "cancelled", "refused", "error"]),
        *[naturals] * 4,
        message=texts,
        field=texts,
        try_later=st.booleans(),
    ),
    st.builds(
        Stats,
        *[naturals] * 6,
        kv_cache_usage=st.floats(0, 1),
        prompt_tokens=naturals,
        output_tokens=naturals,
        prefix_cache_queries=naturals,
        prefix_cache_hits=naturals,
        preemptions=naturals,
        finished=counts,
        rungs=counts,
        groups=st.lists(groups, max_size=2).map(tuple),
    ),
    st.builds(Heartbeat, loads, st.builds(OtherFronts, naturals, naturals)),
    st.builds(
        Pages,
        *[naturals] * 2,
        groups=st.lists(page_groups, max_size=2).map(tuple),
        group=st.binary(max_size=16),
        age=st.binary(max_size=16),
        misses=st.lists(misses, max_size=2).map(tuple),
    ),
    st.builds(
        LargePage,
        *[naturals] * 2,
        group=st.integers(-2, 9),
        owners=st.lists(page_owners, max_size=2).map(tuple),
        cached_ends=ids,
    ),
    st.builds(IndexNotice, naturals, st.lists(index_changes, max_size=3).map(tuple)),
    st.builds(Drained),
)


def body_of(message: Command | Event) -> bytes:
    return encode_frame(message)[HEADER_BYTES:]


def packed(name: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode((name, fields))


@given(commands)
def test_a_command_survives_the_round_trip(command: Command) -> None:
    assert decode_command(body_of(command)) == command


@given(events)
def test_an_event_survives_the_round_trip(event: Event) -> None:
    assert decode_event(body_of(event)) == event


@given(st.lists(events, max_size=6), st.data())
def test_frames_come_out_whole_however_the_stream_is_cut(
    sent: list[Event], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(event) for event in sent)
    reader, received, at = FrameReader(), list[Event](), 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        received += [decode_event(body) for body in reader.feed(stream[at : at + size])]
        at += size
    assert received == sent
    assert reader.pending_bytes == 0


@given(st.lists(events, min_size=1, max_size=5), st.data())
def test_a_flipped_byte_is_noticed_as_soon_as_its_part_of_the_frame_is_there(
    sent: list[Event], data: st.DataObject
) -> None:
    frames = [encode_frame(event) for event in sent]
    ends = list(accumulate(map(len, frames)))
    stream = bytearray(b"".join(frames))
    flipped_at = data.draw(st.integers(0, len(stream) - 1))
    stream[flipped_at] ^= data.draw(st.integers(1, 255))
    damaged = sum(end <= flipped_at for end in ends)
    begin = ends[damaged] - len(frames[damaged])
    in_header = flipped_at < begin + LENGTH_AND_ITS_CHECKSUM_BYTES
    noticed_at = begin + HEADER_BYTES if in_header else ends[damaged]
    cuts = data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=8))
    reader, received = FrameReader(), list[Event]()
    for start, end in pairwise([0, *sorted(cuts), len(stream)]):
        if end >= noticed_at:
            for piece in (bytes(stream[start:end]), b"", encode_frame(Drain())):
                with pytest.raises(ProtocolError, match="header" if in_header else "body"):
                    reader.feed(piece)
            return
        received += [decode_event(body) for body in reader.feed(bytes(stream[start:end]))]
        assert received == sent[: sum(whole <= end for whole in ends)]
    raise AssertionError("the damage was not noticed")


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_raises_anything_else(garbage: bytes) -> None:
    for decode in (decode_command, decode_event):
        with pytest.raises(ProtocolError):
            decode(garbage)


@given(events, st.data())
def test_a_damaged_body_decodes_to_an_event_or_is_refused(
    event: Event, data: st.DataObject
) -> None:
    body = bytearray(body_of(event))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode_event(bytes(body))
    except ProtocolError:
        return
    assert isinstance(decoded, Event)


def test_commands_are_not_events() -> None:
    with pytest.raises(ProtocolError, match="unknown event 'Drain'"):
        decode_event(body_of(Drain()))
    with pytest.raises(ProtocolError, match="unknown command 'Drained'"):
        decode_command(body_of(Drained()))


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="unknown field 'colour'"):
        decode_command(packed("Cancel", request_id="a", colour=1))
    tokens = {"request_id": "a", "attempt": 0, "first_index": 0, "token_ids": (1,)}
    assert decode_event(packed("Tokens", **tokens)) == Tokens(RequestId("a"), 0, 0, (1,))
    with pytest.raises(ProtocolError, match="unknown field 'colour'"):
        decode_event(packed("Tokens", **tokens, colour=1))


SPEC = {"request_id": "a", "prompt": b"", "sampling": {}}


@pytest.mark.parametrize(
    "body",
    [
        packed("Cancel", request_id=7),
        packed("Cancel"),
        packed("Submit", spec={**SPEC, "prompt": "text"}),
        packed("Submit", spec={**SPEC, "prompt": b"abc"}),
        packed("Submit", spec={**SPEC, "colour": 1}),
        packed("Submit", spec={**SPEC, "sampling": {"top_p": 0.0}}),
        packed("Submit", spec={**SPEC, "sampling": {"max_tokens": 1.5}}),
        msgspec.msgpack.encode(("Cancel", {"request_id": "a"}, 1)),
        body_of(Cancel(RequestId("a"))) + b"\0",
        body_of(Cancel(RequestId("a")))[:-1],
        b"",
    ],
)
def test_ill_typed_commands_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_command(body)


def test_sampling_out_of_range_says_what_is_wrong() -> None:
    body = packed("Submit", spec={**SPEC, "sampling": {"temperature": -1.0}})
    with pytest.raises(ProtocolError, match="temperature"):
        decode_command(body)


def test_a_header_that_announces_too_much_is_refused_before_its_body_comes() -> None:
    reader, length = FrameReader(), b"\xff" * 4
    header = length + zlib.crc32(length).to_bytes(4, "little") + bytes(4)
    assert reader.feed(header[:-1]) == []
    with pytest.raises(ProtocolError, match=re.escape(str(0xFFFFFFFF))):
        reader.feed(header[-1:])


def test_a_message_too_long_for_a_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    encode_frame(Cancel(RequestId("short")))
    with pytest.raises(ProtocolError, match="exceeds 100"):
        encode_frame(Cancel(RequestId("x" * 100)))


def test_a_header_is_the_length_its_checksum_and_that_of_the_body() -> None:
    data = frame(b"123456789")
    assert data[:4] == b"\x09\0\0\0"
    assert data[4:8] == zlib.crc32(b"\x09\0\0\0").to_bytes(4, "little")
    assert data[8:HEADER_BYTES] == (0xCBF43926).to_bytes(4, "little")  # the known check value
    assert data[HEADER_BYTES:] == b"123456789"


def test_several_answers_are_never_one_submission() -> None:
    """No engine would draw the further answers."""
    with pytest.raises(ChangeSomething, match="n=2"):
        Submit(RequestSpec(RequestId("a"), b"", SamplingParams(n=2)))
    frame = encode_frame(Submit(RequestSpec(RequestId("a"), b"", SamplingParams())))
    several = frame[HEADER_BYTES:].replace(b"\xa1n\x01", b"\xa1n\x02")
    with pytest.raises(ProtocolError, match="n=2"):
        decode_command(several)


COUNT = 12
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=11, max_tokens=COUNT, ignore_eos=True)
PROMPT = np.arange(300, 340, dtype="<i4")


def as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def answered(
    instance: LocalInstance, name: str, sampling: SamplingParams, output: list[int]
) -> tuple[list[Tokens], Finished]:
    prompt, made = PROMPT.tobytes(), as_bytes(output)
    instance.send(
        Submit(RequestSpec(RequestId(name), prompt, sampling), attempt=len(output), output=made)
    )
    tokens: list[Tokens] = []
    while instance.has_work():
        for event in instance.poll():
            if isinstance(event, Tokens):
                tokens.append(event)
            elif isinstance(event, Finished):
                return tokens, event
    raise AssertionError("no end came")


@pytest.fixture(scope="module")
def instance(shallow_path: Path) -> LocalInstance:
    llm = LLM(str(shallow_path), kv_memory_bytes=64 << 20, dtype="float32", max_model_len=256)
    return LocalInstance(llm.engine)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
        pytest.param(SAMPLED, id="sampled"),
    ],
)
def test_output_goes_on_as_if_nothing_had_happened(
    instance: LocalInstance, sampling: SamplingParams
) -> None:
    kind = zlib.crc32(repr(sampling).encode())
    first, ended = answered(instance, f"whole-{kind}", sampling, [])
    whole = [token for event in first for token in event.token_ids]
    assert (len(whole), ended.reason) == (COUNT, "length")
    for known in range(1, COUNT):
        events, ended = answered(instance, f"{known}-{kind}", sampling, whole[:known])
        assert events[0].first_index == known
        assert [token for event in events for token in event.token_ids] == whole[known:]
        assert {event.attempt for event in events} == {ended.attempt} == {known}
        assert (ended.reason, ended.output_tokens) == ("length", COUNT)
        assert ended.cached_tokens <= len(PROMPT)


def test_output_that_is_all_ends_at_once(instance: LocalInstance) -> None:
    whole = [token for e in answered(instance, "a", GREEDY, [])[0] for token in e.token_ids]
    tokens, ended = answered(instance, "b", GREEDY, whole)
    assert (tokens, ended.reason, ended.output_tokens) == ([], "length", COUNT)
    stops = SamplingParams(temperature=0, max_tokens=COUNT, stop_token_ids=(whole[3],))
    tokens, ended = answered(instance, "c", stops, whole[:4])
    assert (tokens, ended.reason, ended.output_tokens) == ([], "stop", 4)
    assert not instance.has_work()


def test_output_of_another_vocabulary_is_refused(instance: LocalInstance) -> None:
    tokens, ended = answered(instance, "d", GREEDY, [5, 1 << 30])
    assert (tokens, ended.reason, ended.field) == ([], "refused", "output")
    assert str(1 << 30) in ended.message


def test_output_is_whole_tokens_and_survives_the_wire() -> None:
    with pytest.raises(ChangeSomething, match="3 bytes"):
        Submit(RequestSpec(RequestId("a"), b"", GREEDY), output=b"abc")
    submit = Submit(RequestSpec(RequestId("a"), PROMPT.tobytes(), GREEDY), output=as_bytes([7, 8]))
    body = encode_frame(submit)[HEADER_BYTES:]
    assert decode_command(body) == submit
    with pytest.raises(ProtocolError, match="not whole tokens"):
        decode_command(body.replace(b"\xc4\x08" + as_bytes([7, 8]), b"\xc4\x03" + b"abc"))


def test_the_fake_engine_goes_on_too() -> None:
    fake = LocalInstance(FakeEngine())
    whole = [token for e in answered(fake, "a", GREEDY, [])[0] for token in e.token_ids]
    events, ended = answered(fake, "b", GREEDY, whole[:5])
    assert [token for event in events for token in event.token_ids] == whole[5:]
    assert ended.output_tokens == COUNT
    assert answered(fake, "c", GREEDY, whole)[0] == []


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
