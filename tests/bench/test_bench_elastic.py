"""The benches of elastic memory: two sides alike, in turn, parts of steps, and swaps."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.elastic import swapping_step
from bench.elastic.activation_bytes import FIXED_BYTES, activation_model
from bench.elastic.in_turn import SideClock, alternated, tokens_of
from bench.elastic.narrow_models import SHAPES, narrow_config
from bench.elastic.served import MAX_NUM_SEQS, Load, SideRun, lines, options_of
from bench.elastic.step_parts import Shares, StepParts, TimedChunks, shares_line
from bench.elastic.swap_by_cost import SwapByCost
from bench.elastic.swapping_step import Row, line, plan_of
from bench.engine.forward import Shape
from bench.replay.shapes import read_shape
from kvell.calibration.host_copies import BEFORE, NONE, SIDES, UNDER, CopyRig, SideSeconds
from kvell.clock import VirtualClock
from kvell.cost.work import Work
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Finished, Submit, Tokens
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.setup.options import EngineOptions
from kvell.errors import TryLater
from kvell.models.config.description import describe
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
from tests.models.fused_models import fused_model
from tests.models.harness import tiny_module

LOAD = Load(prompt_tokens=300, output_tokens=6, requests=3, fits=60.0)


def test_both_sides_have_the_same_memory_and_the_same_largest_step() -> None:
    model = fused_model(wide_module())
    static, elastic = options_of(model, LOAD)
    reserve_bytes = model.activations.need_bytes(LOAD.prompt_tokens, MAX_NUM_SEQS)
    assert static.kv_memory_bytes is not None and elastic.memory_bytes is not None
    assert static.kv_memory_bytes + reserve_bytes == elastic.memory_bytes - model.weight_bytes
    assert static.max_num_batched_tokens == elastic.max_num_batched_tokens == 300


def test_both_sides_answer_alike_and_say_what_they_did() -> None:
    models = [fused_model(wide_module()), fused_model(wide_module())]
    chosen = zip(("static", "elastic"), models, options_of(models[0], LOAD), strict=True)
    sides = [SideRun(side, model, options, LOAD) for side, model, options in chosen]
    alternated(sides)
    assert not any(side.has_work for side in sides)
    assert sides[0].answers == sides[1].answers
    assert {len(tokens) for tokens in sides[0].answers.values()} == {6}
    figures = [side.figures() for side in sides]
    assert figures[0].reserve_mib > 0 and figures[1].reserve_mib == 0
    assert figures[1].chunks_mapped > 0
    assert all(1 <= side.batch_decoding <= 3 for side in figures)
    told = lines("wide", LOAD, figures)
    assert "3 requests of 300 + 6 tokens" in told[0] and len(told) == 3


@pytest.mark.parametrize("name", SHAPES)
def test_a_narrow_shape_keeps_its_proportions(name: str) -> None:
    """KV of a token, and states, beside widths: an eighth of the model's, layer by layer."""
    whole, narrow = (
        describe(config, 2).layers for config in (read_shape(name).config, narrow_config(name))
    )
    assert len(whole) == len(narrow)
    for one, other in zip(whole, narrow, strict=True):
        assert one.kind is other.kind
        assert one.token_bytes == pytest.approx(8 * other.token_bytes, rel=0.05)


class TestSideClock:
    def test_stands_still_while_others_compute(self) -> None:
        clock = SideClock()
        clock.start()
        time.sleep(0.002)
        clock.stop()
        passed = clock.now_seconds()
        assert passed >= 0.002
        time.sleep(0.002)
        assert clock.now_seconds() == passed

    def test_waits_forward_only(self) -> None:
        clock = SideClock()
        clock.wait_until(3.0)
        clock.wait_until(2.0)
        assert clock.now_seconds() == 3.0


class Counted:
    """A side with a number of steps, which notes when it runs one."""

    def __init__(self, name: str, steps: int, log: list[str]) -> None:
        self._name, self._left, self._log = name, steps, log

    @property
    def has_work(self) -> bool:
        return self._left > 0

    def step(self) -> None:
        self._left -= 1
        self._log.append(self._name)


def test_sides_take_turns_until_the_last_is_done() -> None:
    log: list[str] = []
    alternated([Counted("a", 2, log), Counted("b", 4, log)])
    assert log == ["a", "b", "a", "b", "b", "b"]


class TestTokens:
    NEW = Tokens(RequestId("a"), 0, 0, (7,))

    def test_come_from_the_events_of_a_step(self) -> None:
        ended = Finished(RequestId("a"), 0, "length")
        assert list(tokens_of([self.NEW, ended, self.NEW])) == [self.NEW, self.NEW]

    def test_a_request_that_was_given_up_is_an_error(self) -> None:
        ended = Finished(RequestId("a"), 0, "refused", message="no room")
        with pytest.raises(RuntimeError, match="refused: no room"):
            list(tokens_of([self.NEW, ended]))


class Looked:
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


SECONDS = {side: SideSeconds(0.5, 1.0, 2.0) for side in SIDES}


def test_a_plan_has_the_shape_that_is_asked_for() -> None:
    rig = CopyRig(fused_model(tiny_module("LlamaForCausalLM")), 1 << 20, 8, VirtualClock())
    plan = plan_of(rig, Shape(3, 2, 64), 8)
    assert [(work.start, work.count) for work in plan.work] == [(62, 2)] * 3
    assert len(plan.offloads) == len(plan.fetches) == 8


def test_a_row_tells_how_far_the_replay_is_from_the_middle_round() -> None:
    row = Row("3x1x64", 8, 1.0, SECONDS, {BEFORE: 1.2, UNDER: 0.9})
    assert row.error(BEFORE) == pytest.approx(0.2)
    assert row.error(UNDER) == pytest.approx(-0.1)
    assert NONE in line(row)
    assert "+20 %" in line(row) and "1000.0 (500.0 to 2000.0)" in line(row)


def test_a_row_tells_what_the_engine_would_choose() -> None:
    seen = SECONDS | {UNDER: SideSeconds(1.0, 1.3, 2.0)}
    row = Row("3x1x64", 8, 1.0, seen, {BEFORE: 1.0, UNDER: 1.0})
    assert row.chosen(has_spare=True) == pytest.approx(0.3)
    assert row.chosen(has_spare=False) == 0.0


def test_the_command_writes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "swapping.json"
    model = fused_model(tiny_module("LlamaForCausalLM"))
    monkeypatch.setattr(swapping_step, "load_model", lambda *_: model)
    monkeypatch.setattr(swapping_step, "resolve_model", lambda *_: tmp_path)
    monkeypatch.setattr("bench.machine.read_bandwidth_gb_per_second", lambda: 9.0)
    monkeypatch.setattr(swapping_step, "copies_beside_passes", lambda _: False)
    words = ["swapping_step", "--steps", "3x1x64", "--pages", "8", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*words, "--pool-mib", "1", "--json", str(path)])
    swapping_step.main()
    written = json.loads(path.read_text())
    assert 0 <= written["slows"] <= 3
    assert written["copies_under_pass"] is False
    assert [row["pages"] for row in written["rows"]] == [8]
    shown = capsys.readouterr().out
    assert "copied before the pass here: +0 to +0 %" in shown


class Linear:
    """A millisecond a step, a microsecond a token."""

    def step_seconds(self, work: Sequence[Work]) -> float:
        return 1e-3 + 1e-6 * sum(one.count for one in work)


def test_seconds_of_the_link_stand_beside_those_of_the_tokens() -> None:
    rule = SwapByCost(Linear(), 1e9, 400)
    recompute_seconds = 1e-6 * 1000 - 3 * 1e-6  # three steps of 400, 400 and 200 tokens
    most_bytes = int(recompute_seconds * 1e9 / 2)
    assert rule.swaps(1000, most_bytes)
    assert not rule.swaps(1000, most_bytes + 2)
    assert not rule.swaps(0, 0)


@pytest.mark.parametrize(
    ("name", "widest"),
    [
        ("llama3-8b", 3 * 14336),  # the gated MLP
        ("jamba-mini", 2 * (3 * 14336 + 4096)),  # two experts and their outputs
    ],
)
def test_the_widest_point_of_a_layer_decides(name: str, widest: int) -> None:
    shape = read_shape(name)
    model = activation_model(shape.config, shape.description, 2)
    assert model.fixed_bytes == FIXED_BYTES
    assert model.token_bytes == 2 * (2 * 4096 + widest)
    assert model.logits_row_bytes == 6 * shape.description.vocab_size
