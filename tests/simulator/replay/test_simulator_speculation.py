"""Draft tokens in virtual time: how many are right, what they cost, which memory they take."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from kvell.clock import VirtualClock
from kvell.cost.analytic import ModelCost
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import TO_DRAFT, StepPlan, TokenWork
from kvell.memory import LayerSpec, Manager, as_draft, create_core, longest_request, plan_layout
from kvell.simulator.replay.runner import Acceptance, Machine, TraceRunner, draft_passes
from kvell.simulator.traces.drawing import keyed_fraction
from kvell.simulator.traces.prompts import PromptMaker
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import StepNumber
from tests.engine.works import work_of
from tests.simulator.replays import PROFILE, Replay, layer_of, row

GREEDY = SamplingParams(temperature=0)
TARGET = [layer_of(0, 0, 4), layer_of(1, 9, 4)]
PLAIN = [layer_of(0, 0, 4), layer_of(1, 0, 4)]
DRAFT = as_draft([layer_of(0, 0, 1)])


def test_a_keyed_number_is_drawn_evenly_and_only_once() -> None:
    drawn = np.asarray([keyed_fraction(3, i) for i in range(4_000)])
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.02 and abs(drawn.std() - 12**-0.5) < 0.02
    assert keyed_fraction(3, 5) == drawn[5] != keyed_fraction(5, 3)


def work(request: int, start: int, count: int, proposed: int = 0) -> TokenWork:
    tokens = np.full(count, 7, np.int32)
    tokens[count - proposed :] = TO_DRAFT
    return work_of(str(request), request + 1, start, count, tokens, GREEDY, proposed=proposed)


def spans(work: Sequence[TokenWork]) -> list[tuple[str, int, int]]:
    return [(w.request_id, w.start, w.count) for w in work]


def test_a_draft_model_computes_known_tokens_then_draft_token_by_draft_token() -> None:
    plan = StepPlan(StepNumber(1), work=(work(0, 9, 3, 2), work(1, 0, 8), work(2, 4, 2, 1)))
    assert [spans(one) for one in draft_passes(plan)] == [
        [("0", 9, 1), ("1", 0, 8), ("2", 4, 1)],
        [("0", 10, 1), ("2", 5, 1)],
        [("0", 11, 1)],
    ]
    assert spans(draft_passes(StepPlan(StepNumber(1), work=(work(1, 0, 8),)))[0]) == [("1", 0, 8)]


def test_a_step_lasts_as_long_as_both_models_take() -> None:
    machine = Machine(PROFILE, ModelCost(10, 3 * 10**9, 1), ModelCost(1, 10**9, 1))
    plan = StepPlan(StepNumber(1), work=(work(0, 9, 3, 2),))
    assert machine.step_seconds(plan) == (1 + 3) + 3 * (1 + 1)
    assert replace(machine, draft=None).step_seconds(plan) == 1 + 3


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 1), (1.0, 5)])
def test_draft_tokens_that_are_always_or_never_right(rate: float, kept: int) -> None:
    runner = TraceRunner(PromptMaker([row(9, 40)]), Acceptance(rate))
    result = runner.run(StepPlan(StepNumber(1), work=(work(0, 9, 5, 4),)))
    assert [len(tokens) for tokens in result.by_work()] == [kept]


def test_as_many_draft_tokens_are_right_as_was_said() -> None:
    """The rate holds after right ones: the first of a step is right at the rate itself."""
    runner = TraceRunner(PromptMaker([row(9, 2_000)]), Acceptance(0.7, seed=4))
    first = [work(0, 9, 2, 1) for _ in range(1_000)]
    plans = [
        StepPlan(StepNumber(i), work=(structs.replace(one, output_index=i),))
        for i, one in enumerate(first)
    ]
    kept = [len(runner.run(plan).by_work()[0]) - 1 for plan in plans]
    assert abs(sum(kept) / len(kept) - 0.7) < 0.04


def replayed(
    layers: Sequence[LayerSpec],
    manager: Manager = "kvell",
    draft_tokens: int = 3,
    acceptance: float = 0.7,
    draft: ModelCost | None = None,
) -> Replay:
    """Sixty requests of 40 to 100 tokens in a pool for a few."""
    rows: list[TraceRow] = [row(20 + i % 40, 20 + i * 7 % 41) for i in range(60)]
    layout = plan_layout(layers, 96 << 10, manager=manager, page_tokens=4)
    limits = Limits(
        64,
        64,
        max_model_len=longest_request(layout, 400, 4),
        min_chunk_tokens=4,
        num_speculative_tokens=draft_tokens,
        has_drafter=True,
    )
    machine = Machine(PROFILE, ModelCost(1, 0, 1), draft)
    run = Replay(
        create_core(layout),
        layers,
        limits,
        rows,
        "start",
        machine,
        VirtualClock(),
        acceptance=Acceptance(acceptance),
    )
    run.run()
    return run


def test_draft_tokens_save_steps_and_change_no_length() -> None:
    plain, drafting = (replayed([*TARGET, *DRAFT], draft_tokens=n).report() for n in (0, 3))
    assert plain["spec_decode_drafts"] == 0
    assert drafting["output_tokens"] == plain["output_tokens"]
    assert drafting["requests_finished"] == plain["requests_finished"] == 60
    assert drafting["steps"] < 0.7 * plain["steps"]
    made, accepted = drafting["spec_decode_draft_tokens"], drafting["spec_decode_accepted_tokens"]
    assert 0.4 < accepted / made < 0.7, "a draft token counts only after right ones"


def test_the_better_the_draft_tokens_the_fewer_the_steps() -> None:
    steps = [replayed([*TARGET, *DRAFT], acceptance=r).report()["steps"] for r in (0, 0.5, 1)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.5 * steps[2]


def test_a_draft_model_takes_time_and_memory() -> None:
    free = replayed([*TARGET, *DRAFT]).report()
    dear = replayed([*TARGET, *DRAFT], draft=ModelCost(1, 10**9, 1)).report()
    assert dear["steps"] == free["steps"]
    assert dear["virtual_seconds"] > 4 * free["virtual_seconds"]
    assert dear["output_tokens_per_second"] < free["output_tokens_per_second"] / 4
    assert [group["name"] for group in free["groups"]] == ["full", "sliding(9)", "draft-full"]
    assert all(group["needed_bytes_mean"] > 0 for group in free["groups"])
    alone = replayed(TARGET).report()
    assert alone["batch_saturated_mean"] > 1.05 * free["batch_saturated_mean"]


def test_plain_models_share_a_pool_as_well_as_by_hand() -> None:
    layers = [*PLAIN, *DRAFT]
    ours, manual, largest = (
        replayed(layers, manager).report() for manager in ("kvell", "manual", "max-page")
    )
    assert abs(ours["batch_saturated_mean"] / manual["batch_saturated_mean"] - 1) < 0.05
    assert ours["batch_saturated_mean"] > 1.3 * largest["batch_saturated_mean"]


def test_models_of_mixed_layers_share_it_better() -> None:
    layers = [*TARGET, *DRAFT]
    ours, manual, largest = (
        replayed(layers, manager).report() for manager in ("kvell", "manual", "max-page")
    )
    assert ours["batch_saturated_mean"] > 1.3 * manual["batch_saturated_mean"]
    assert ours["batch_saturated_mean"] > 1.3 * largest["batch_saturated_mean"]
    assert ours["waste"] < min(manual["waste"], largest["waste"])
