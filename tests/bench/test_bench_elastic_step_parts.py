"""Parts of a step's time, by a clock that advances a second at every reading."""

import numpy as np
import pytest

from bench.elastic.in_turn import tokens_of
from bench.elastic.step_parts import Shares, StepParts, TimedChunks, shares_line
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.setup.options import EngineOptions
from kvell.errors import TryLater
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.device.fake_chunks import FakeChunks
from tests.engine.setup.shared_pool import (
    SAMPLING,
    elastic_of,
    engine_over,
    prompts,
    roomy,
    wide_module,
)


class Looked:
    """A clock that counts its readings."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_seconds(self) -> float:
        self.seconds += 1
        return self.seconds


def run(engine: Engine) -> Shares:
    """All answers, each step through the parts."""
    parts = StepParts(engine, Looked())
    for index, prompt in enumerate(prompts(3, seed=2)):
        ids = np.asarray(prompt, "<i4").tobytes()
        assert is_accepted(engine.handle(Submit(RequestSpec(RequestId(str(index)), ids, SAMPLING))))
    tokens = 0
    while engine.has_work():
        tokens += len(list(tokens_of(parts.step())))
    assert tokens == 3 * (SAMPLING.max_tokens or 0) > 0
    return parts.shares()


def test_of_a_step_without_mapping_a_third_is_the_models() -> None:
    """The clock is read four times: at both ends, and around the runner."""
    engine = engine_over(
        wide_module(),
        EngineOptions(kv_memory_bytes=64 * MIB, max_model_len=1024, max_num_batched_tokens=512),
    )
    shares = run(engine)
    assert shares.steps > 3
    assert (shares.step_seconds, shares.mapping) == (3.0, 0.0)
    assert shares.scheduling == pytest.approx(2 / 3)


def test_calls_of_the_device_are_mapping_and_not_scheduling() -> None:
    module = wide_module()
    engine = engine_over(module, roomy(module, 14))
    shares = run(engine)
    counts, device = elastic_of(engine).counts, elastic_of(engine).device
    assert counts.mapped and isinstance(device, TimedChunks)
    assert 0 < shares.mapping < shares.scheduling
    # Each call reads the clock twice: one second is its own, one more is the loop's.
    total = shares.steps * shares.step_seconds
    calls = shares.mapping * total
    assert total == pytest.approx(3 * shares.steps + 2 * calls)
    assert shares.scheduling * total == pytest.approx(2 * shares.steps + calls)


def test_a_device_that_refuses_took_its_time_too() -> None:
    device = FakeChunks(4)
    timed = TimedChunks(device, Looked())
    timed.commit(np.arange(4, dtype=np.int32))
    area = timed.reserve(4)
    one = np.zeros(1, np.int32)
    device.fail("map")
    with pytest.raises(TryLater):
        timed.map(area, one, one)
    assert timed.seconds == 2
    assert timed.chunk_bytes == device.chunk_bytes


def test_people_read_milliseconds_and_percent() -> None:
    line = shares_line(Shares(7, 0.0104, 0.0123, 0.00051))
    assert line == "a step 10.4 ms, scheduling 1.23 %, mapping 0.05 %"
