"""However a team goes through a pass, whoever takes which share: the same bits."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from bench.busy_program import busy_program
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.llm import LLM
from kvell.models.fused.decoder import (
    ALONE_BELOW,
    MOST_RESTING_TOKENS,
    SHARED_ABOVE,
    WEIGHT,
    PassRecord,
    TeamRule,
    Way,
)
from kvell.models.loading.random_weights import random_module
from kvell.models.paged_model import PagedModel
from kvell.models.partials.remote_sections import RemoteSections
from tests.depth import few
from tests.models.cases import covering
from tests.models.fused_models import fused_model
from tests.models.harness import prompt_ids, runner_over, tiny_config, tiny_module
from tests.models.lent_pass import Lender, Work, lent_logits, lent_runs, local_logits, prefix_of
from tests.models.loading.recorder import Recorder, assert_every_seam_in_order

WIDE = {"hidden_size": 192, "intermediate_size": 1000}
"""Products of many shares."""
FAMILIES = {
    "LlamaForCausalLM": WIDE,
    "Gemma3ForCausalLM": WIDE,
    "FalconH1ForCausalLM": {},
}
DTYPES = (torch.float32, torch.bfloat16)
MOST_STEPS = 5000


class DrawnTeam(TeamRule):
    """Goes in given ways, one after the other, again and again; notes what it is told."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__(1)
        self._ways, self._next = ways, 0
        self.passed: list[PassRecord] = []

    def way(self, tokens: int) -> Way:
        self._next += 1
        return self._ways[self._next % len(self._ways)]

    def note(self, passed: PassRecord) -> None:
        assert len(passed.lost_ns) == passed.way.threads
        assert min(passed.lost_ns) >= 0 < passed.took_ns
        self.passed.append(passed)


MOST_THREADS = 5
ways = st.builds(
    Way,
    threads=st.integers(1, MOST_THREADS),
    is_shared=st.booleans(),
    resting=st.integers(0, 2**MOST_THREADS - 1),
    work_ns=st.sampled_from([0, 0, 5_000, 100_000]),
    rest_ns=st.sampled_from([0, 1_000, 100_000, 1_000_000]),
)
REST_ALWAYS = Way(4, True, 0b1110, 0, 200_000)


@cache
def model_of(architecture: str, dtype: torch.dtype) -> PagedModel:
    config = tiny_config(architecture, **FAMILIES[architecture])
    config.mamba_ssm_cache_dtype = "float32"
    module = random_module(config, 3, dtype, 8.0)
    return fused_model(module, num_threads=MOST_THREADS)


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    """Models last as long as this file's tests."""
    yield
    model_of.cache_clear()
    prefix_of.cache_clear()


def logits_of(model: PagedModel, team: TeamRule) -> torch.Tensor:
    """Of chunks, of a batch, and of decodes that read what they wrote."""
    assert model.fused is not None
    model.fused.team = team
    ids, other, runner = prompt_ids(60), prompt_ids(33, seed=1), runner_over(model)
    found = [runner.step([("a", ids[:40])]), runner.step([("a", ids[40:50]), ("b", other)])]
    found += [runner.step([("a", [token]), ("b", [token])]) for token in ids[50:]]
    return torch.cat(found)


@covering({"architecture": list(FAMILIES), "dtype": DTYPES}, together=1)
@given(drawn=st.lists(ways, min_size=1, max_size=4))
@example(drawn=[REST_ALWAYS])
@example(drawn=[Way(MOST_THREADS, True)])
@few()
def test_no_way_changes_a_bit(architecture: str, dtype: torch.dtype, drawn: list[Way]) -> None:
    model, team = model_of(architecture, dtype), DrawnTeam(drawn)
    alone = logits_of(model, DrawnTeam([Way(1)]))
    assert torch.equal(logits_of(model, team), alone)
    assert len(team.passed) == 12
    assert len(set(alone.argmax(-1).tolist())) > 5


@pytest.mark.parametrize("dtype", DTYPES)
@given(drawn=ways)
@example(drawn=REST_ALWAYS)
@few()
def test_nor_where_others_hold_sections(dtype: torch.dtype, drawn: Way) -> None:
    """The caller's own thread asks for them and waits."""
    prefix = prefix_of("Gemma2ForCausalLM", dtype, MOST_THREADS)
    work = [Work(1600, 1, ("x", "x", "y")), Work(1100, 60, ("y", "y")), Work(900, 1)]
    local = local_logits(prefix, work)
    lenders = {name: Lender(prefix, seed) for seed, name in enumerate("xy")}
    elsewhere = RemoteSections({name: one.creditor for name, one in lenders.items()})
    assert prefix.model.fused is not None
    kept, prefix.model.fused.team = prefix.model.fused.team, DrawnTeam([drawn])
    try:
        lent = lent_logits(prefix, work, elsewhere, lent_runs(lenders, work))
    finally:
        prefix.model.fused.team = kept
    assert torch.equal(lent, local)


def with_way(way: Way) -> PagedModel:
    model = fused_model(tiny_module("Gemma3ForCausalLM"), num_threads=MOST_THREADS)
    assert model.fused is not None
    model.fused.team = DrawnTeam([way])
    return model


@pytest.mark.parametrize("way", [Way(3, True), REST_ALWAYS], ids=["shared", "resting"])
def test_every_seam_comes_in_order_and_on_the_caller_s_thread(way: Way) -> None:
    assert_every_seam_in_order(with_way(way))


@pytest.mark.parametrize("way", [Way(3, True), REST_ALWAYS], ids=["shared", "resting"])
def test_a_callback_that_fails_ends_a_pass_whose_threads_come_late(way: Way) -> None:
    class Broken(Recorder):
        def after_attend(self, layer: int, output: torch.Tensor) -> None:
            if layer == 1:
                raise KeyError("gone")

    model, work = with_way(way), [("a", prompt_ids(9))]
    whole = runner_over(model).step(work)
    for _ in range(20):
        runner = runner_over(model)
        runner.callbacks = Broken()
        with pytest.raises(KeyError, match="gone"):
            runner.step(work)
        assert torch.equal(runner_over(model).step(work), whole)


@pytest.mark.parametrize("threads", [None, 3])
def test_an_engine_tells_its_threads_and_what_they_lost(
    shallow_path: Path, threads: int | None
) -> None:
    llm = LLM(str(shallow_path), kv_memory_bytes=16 << 20, threads=threads)
    assert llm.engine.core.stats().team == {}
    llm.generate([[11] * 9], SamplingParams(max_tokens=3, ignore_eos=True))
    team = llm.engine.core.stats().team
    assert team["threads"] == (threads or torch.get_num_threads())
    assert 0 <= team["lost_seconds"] < team["thread_seconds"]
    assert threads is None or not team["shared"], "a number fixes the team"


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="the system does not tell"
)
def test_a_team_gives_way_to_a_neighbour() -> None:
    """That it goes as if alone again behind it is the rule's: here others may always run."""
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("a team needs two processors")
    threads = len(processors)
    module = random_module(tiny_config("LlamaForCausalLM", **WIDE), 3, torch.float32, 8.0)
    model, ids = fused_model(module, num_threads=threads), prompt_ids(64)
    assert model.fused is not None
    team = model.fused.team = TeamRule(threads)
    lost_ns = 0
    with busy_program(processors[-1]):
        for _ in range(MOST_STEPS):
            runner_over(model).step([("a", ids)])
            assert model.passed is not None
            lost_ns += model.passed.lost_ns[-1]
            if team.way(len(ids)).is_shared:
                break
    assert team.way(len(ids)).is_shared, f"in {MOST_STEPS} steps it never gave way"
    assert lost_ns > 0, "the thread beside the neighbour lost nothing"


TOOK_NS = 1_000_000
LOST_NS = TOOK_NS // 2
"""What a thread loses to one busy program."""
SOON, LATER = 24, 48


def step(rule: TeamRule, lost_ns: Sequence[int]) -> Way:
    way = rule.way(1)
    rule.note(PassRecord(way, TOOK_NS, lost_ns))
    return way


def beside(rule: TeamRule, lost_ns: Sequence[int]) -> Way:
    for _ in range(SOON):
        step(rule, lost_ns)
    return rule.way(1)


LITTLE_NS = int(SHARED_ABOVE * TOOK_NS / 3)


@given(st.lists(st.lists(st.integers(0, LITTLE_NS), min_size=3, max_size=3)))
def test_a_team_that_loses_little_goes_as_if_alone(steps: list[list[int]]) -> None:
    rule = TeamRule(3)
    assert {step(rule, lost) for lost in steps} <= {Way(3)}


def test_one_step_that_lost_everything_changes_nothing() -> None:
    rule = TeamRule(2)
    for lost in ([0, TOOK_NS], *[[0, 0]] * 10) * 10:
        assert step(rule, lost) == Way(2)


@pytest.mark.parametrize(
    ("lost", "resting"),
    [
        ((0, LOST_NS, 0), 0b010),
        ((0, LOST_NS, LOST_NS), 0b110),
        ((LOST_NS, 0, 0), 0b100),
        ((LOST_NS, LOST_NS, 0), 0b010),
        ((LOST_NS, LOST_NS, LOST_NS), 0b110),
    ],
    ids=str,
)
def test_threads_that_lose_rest_but_never_the_caller_s(lost: tuple[int, ...], resting: int) -> None:
    way = beside(TeamRule(3), lost)
    assert (way.is_shared, way.resting) == (True, resting)


def test_long_steps_give_way_without_a_rest() -> None:
    rule = TeamRule(2)
    assert rule.way(MOST_RESTING_TOKENS + 1) == Way(2)
    assert beside(rule, [0, LOST_NS]) == rule.way(MOST_RESTING_TOKENS)
    long = rule.way(MOST_RESTING_TOKENS + 1)
    assert (long.is_shared, long.resting) == (True, 0)


def test_a_neighbour_that_moves_is_followed() -> None:
    rule = TeamRule(3)
    assert beside(rule, [0, LOST_NS, 0]).resting == 0b010
    for _ in range(2):
        step(rule, [0, 0, LOST_NS])
    assert rule.way(1).resting == 0b110, "the first may lose again"
    for _ in range(LATER):
        step(rule, [0, 0, LOST_NS])
    assert rule.way(1).resting == 0b100


@pytest.mark.parametrize("rule", [TeamRule(1), TeamRule(2, is_fixed=True)])
def test_one_thread_and_a_fixed_team_learn_nothing(rule: TeamRule) -> None:
    alone = rule.way(1)
    assert not alone.is_shared
    lost = [LOST_NS] * alone.threads
    assert {step(rule, lost) for _ in range(50)} == {alone}


@given(st.lists(st.integers(0, 3), max_size=50))
def test_a_neighbour_that_is_seen_now_and_then_is_still_there(calm: list[int]) -> None:
    rule = TeamRule(2)
    way = beside(rule, [LOST_NS, LOST_NS])
    for steps in calm:
        assert {step(rule, [0, 0]) for _ in range(steps)} <= {way}
        for _ in range(steps + 1):
            assert step(rule, [LOST_NS, LOST_NS]) == way


@given(st.integers(0, 200))
def test_behind_a_neighbour_that_left_the_team_is_alone_again(steps: int) -> None:
    rule = TeamRule(2)
    way = beside(rule, [0, LOST_NS])
    for _ in range(steps):
        step(rule, [0, LOST_NS])
    assert {step(rule, [0, 0]) for _ in range(LATER)} == {way, Way(2)}
    assert {step(rule, [0, 0]) for _ in range(50)} == {Way(2)}
    assert beside(rule, [0, LOST_NS]) == way, "and it learns again as at first"


def test_what_keeps_a_way_would_not_have_begun_it() -> None:
    part_ns = int((ALONE_BELOW + SHARED_ABOVE) / 2 * TOOK_NS)
    rule = TeamRule(2)
    assert {step(rule, [0, part_ns]) for _ in range(100)} == {Way(2)}
    way = beside(rule, [0, LOST_NS])
    assert way.is_shared
    assert {step(rule, [0, part_ns]) for _ in range(100)} == {way}


@given(st.lists(st.lists(st.integers(0, TOOK_NS), min_size=4, max_size=4), max_size=300))
def test_whatever_happens_a_way_is_one_of_the_team(steps: list[list[int]]) -> None:
    """A team that gives way has lost enough on average; one that does not has not lost too much."""
    rule, lost = TeamRule(4), 0.0
    for losses in steps:
        way = step(rule, losses)
        assert way.threads == 4
        assert way.resting in range(0, 16, 2)
        assert bool(way.resting) == way.is_shared
        assert lost > ALONE_BELOW - 1e-9 if way.is_shared else lost < SHARED_ABOVE + 1e-9
        lost += WEIGHT * (sum(losses) / TOOK_NS - lost)
