"""Objectives of a served engine: what is refused, who is notified, and what changes."""

import pytest
import torch

from kvell.clock import VirtualClock
from kvell.engine.core.journal import Journal
from kvell.engine.core.lateness import EARLY_TTFT, Lateness
from kvell.engine.cpu_buffer.parking import Parking
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import Cancel, Finished, Tokens
from kvell.engine.setup.objectives import ObjectiveWatch, check_objectives, watch_of
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import MIB, RequestId
from tests.engine.conftest import make_submit
from tests.engine.setup.shared_pool import engine_over, roomy, wide_module

NAME = RequestId("a")
NONE = Lateness(ttft_late=False, tpot_late=False)


def watch(
    ttft: float | None = 10.0, tpot: float | None = None
) -> tuple[ObjectiveWatch, VirtualClock]:
    clock = VirtualClock()
    options = EngineOptions(slo_ttft_seconds=ttft, slo_tpot_seconds=tpot, cpu_buffer_bytes=1)
    made = watch_of(options, clock)
    assert made is not None
    return made, clock


def test_nobody_is_watched_without_objectives() -> None:
    assert watch_of(EngineOptions(), VirtualClock()) is None
    assert not EngineOptions().has_objectives


def test_it_is_early_that_a_first_token_is_late() -> None:
    late, clock = watch(ttft=10.0)
    late.on_command(make_submit("a", [1, 2]), [])
    clock.advance(10.0 * EARLY_TTFT)
    assert late.after_step([]) == NONE
    clock.advance(0.1)
    assert late.after_step([]) == Lateness(ttft_late=True, tpot_late=False)


def test_an_objective_that_is_not_given_is_never_missed() -> None:
    late, clock = watch(ttft=None, tpot=1.0)
    late.on_command(make_submit("a", [1, 2]), [])
    clock.advance(1e9)
    assert late.after_step([Tokens(NAME, 0, 0, (1,))]) == NONE
    clock.advance(1e9)
    assert late.after_step([]) == Lateness(ttft_late=False, tpot_late=True)
    first_only, clock = watch(ttft=1.0)
    first_only.on_command(make_submit("a", [1, 2]), [])
    first_only.after_step([Tokens(NAME, 0, 0, (1,)), Tokens(NAME, 0, 1, (1,))])
    clock.advance(1e9)
    assert first_only.after_step([]) == NONE


def test_who_is_refused_was_never_late_and_who_is_cancelled_is_late_no_more() -> None:
    late, clock = watch(ttft=1.0)
    late.on_command(make_submit("a", [1]), [Finished(NAME, 0, "refused")])
    clock.advance(9.0)
    assert late.after_step([]) == NONE
    late.on_command(make_submit("b", [1]), [])
    clock.advance(9.0)
    assert late.after_step([]).ttft_late
    late.on_command(Cancel(RequestId("b")), [Finished(RequestId("b"), 0, "cancelled")])
    assert late.after_step([]) == NONE


@pytest.mark.parametrize(
    ("options", "flag", "problem", "remedy"),
    [
        (EngineOptions(slo_ttft_seconds=1.0), "--slo-ttft", "there is none", "--cpu-buffer"),
        (EngineOptions(slo_tpot_seconds=0.1), "--slo-tpot", "there is none", "--cpu-buffer"),
        (
            EngineOptions(slo_tpot_seconds=0.0, cpu_buffer_bytes=MIB),
            "--slo-tpot",
            "not above 0",
            "give seconds",
        ),
        (
            EngineOptions(slo_ttft_seconds=float("nan"), cpu_buffer_bytes=MIB),
            "--slo-ttft",
            "not above 0",
            "give seconds",
        ),
        (
            EngineOptions(slo_tpot_seconds=1.0, cpu_buffer_bytes=MIB, enable_chunked_prefill=False),
            "--slo-tpot",
            "as they always do without chunked prefill",
            "leave it out",
        ),
    ],
)
def test_objectives_that_nothing_can_be_done_for_are_refused_by_name(
    options: EngineOptions, flag: str, problem: str, remedy: str
) -> None:
    with pytest.raises(ChangeSomething, match=problem) as refused:
        check_objectives(options)
    assert refused.value.field == flag
    assert remedy in refused.value.remedy
    check_objectives(EngineOptions(slo_ttft_seconds=1.0, cpu_buffer_bytes=MIB))


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return wide_module()


def parking_of(engine: Engine) -> Parking | None:
    return engine.core.scheduler.parking


def test_only_an_engine_with_objectives_lets_prompts_go_ahead(module: torch.nn.Module) -> None:
    assert parking_of(engine_over(module, roomy(module, cpu_buffer_bytes=MIB))) is None
    engine = engine_over(module, roomy(module, cpu_buffer_bytes=8 * MIB, slo_tpot_seconds=0.1))
    parking, swapping = parking_of(engine), engine.core.scheduler.swapping
    assert parking is not None
    assert swapping is not None
    sizes = parking.sizes
    assert (sizes.logical_chunks, sizes.physical_chunks) == (1, swapping.buffer.num_large)


def test_objectives_without_a_buffer_are_refused_at_start(module: torch.nn.Module) -> None:
    with pytest.raises(ChangeSomething, match="--slo-ttft"):
        engine_over(module, roomy(module, slo_ttft_seconds=1.0))


def test_the_journal_has_who_was_late_after_every_step(module: torch.nn.Module) -> None:
    journal = Journal()
    options = roomy(module, cpu_buffer_bytes=8 * MIB, slo_ttft_seconds=1e-9)
    engine = engine_over(module, options, journal)
    assert is_accepted(engine.handle(make_submit("a", [3, 4, 5], 6)))
    while engine.has_work():
        engine.step()
    told = [entry for entry in journal.entries if isinstance(entry, Lateness)]
    assert [late.ttft_late for late in told] == [True, *[False] * 5]
    assert not any(late.tpot_late for late in told)
    assert engine.core.stats().buffer["logical_large_pages"] == 1, "one late step is no violation"
