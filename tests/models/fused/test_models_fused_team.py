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
from kvell.models.fused.decoder import PassRecord, TeamRule, Way
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
