"""Fronts that know the secret and say anything: no command ends an instance."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.codec import decode_command, encode_frame
from kvell.engine.protocol.messages import Command, Submit
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.serving.gate import CommandGate, front_of
from kvell.vocabulary import RequestId
from kvell.wire.frames import HEADER_BYTES, ProtocolError
from tests.depth import some
from tests.engine.setup.small_engine import make_engine
from tests.wire.any_message import PLAIN, any_of, packed

TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=12).map(packed)
KNOWN = {
    **PLAIN,
    RequestId: st.sampled_from(("front:1", "front:2", "other:1", "")),
    int: st.integers(0, 5) | PLAIN[int],
    float: st.sampled_from((0.0, 0.5, 1.0)) | PLAIN[float],
    str: st.sampled_from(("", "", "virtual")) | PLAIN[str],
    bytes: TOKENS | PLAIN[bytes],
}
PARAMS = st.just(SamplingParams(max_tokens=3)) | any_of(SamplingParams, KNOWN)
COMMANDS = any_of(Command, KNOWN) | any_of(Submit, {**KNOWN, SamplingParams: PARAMS})


@some()
@given(depth=st.integers(0, 1), said=st.lists(st.tuples(COMMANDS, st.integers(0, 3)), max_size=8))
def test_any_command_is_taken_or_refused(depth: int, said: list[tuple[Command, int]]) -> None:
    engine, _ = make_engine(depth=depth)
    gate = CommandGate(engine, front_of)
    for command, steps in said:
        try:
            heard = decode_command(encode_frame(command)[HEADER_BYTES:])
        except (ProtocolError, OverflowError):
            continue
        gate.accept(heard, "front")
        for _ in range(steps):
            if gate.has_work():
                gate.advance()
    gate.cancel_all()
    while gate.has_work():
        gate.advance()
    assert not gate.has_requests()
    assert engine.core.audit() == ()
