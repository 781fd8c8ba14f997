"""A request that was submitted with the output of an earlier attempt goes on where that stopped."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.errors import ChangeSomething
from kvell.llm import LLM
from kvell.serving.lone import LocalInstance
from kvell.testing.instance import FakeEngine
from kvell.vocabulary import RequestId
from kvell.wire.frames import HEADER_BYTES, ProtocolError

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
