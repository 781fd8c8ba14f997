"""Several models in one engine core: the rules of each, and which share what."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvell.engine.assembly import make_limits
from kvell.engine.core.core import EngineCore
from kvell.engine.core.journal import Journal, replay
from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.plan import StepPlan, StepResult
from kvell.engine.setup.contract import make_contract, model_share
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.several_models import ServedModel, check_several
from kvell.errors import ChangeSomething
from kvell.memory import (
    GroupKind,
    LayerSpec,
    audit,
    create_core,
    longest_request,
    plan_layout,
    requests_that_fit,
)
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import KIB, MIB, RequestId
from tests.engine.setup.several_models import EOS, FULL, MIXED, core_over, pool
from tests.journaled import JournaledCore
from tests.pages.pools import layers


def ask(name: str, model: str, tokens: int, outputs: int = 5, first: int = 5) -> Submit:
    ids = np.arange(tokens, dtype="<i4") % 40 + first
    params = SamplingParams(temperature=0, max_tokens=outputs)
    return Submit(RequestSpec(RequestId(name), ids.tobytes(), params, model=model))


def step(core: EngineCore, token: int = 7) -> tuple[StepPlan, list[Any]]:
    """Run a step in which every decoding request draws the same token."""
    plan = core.plan()
    result = StepResult(plan.step, (token,) * plan.num_logits)
    events = core.commit(result)
    assert audit(core.memory.layout, core.memory.snapshot()) == []
    return plan, list(events)


def finished(events: list[Any]) -> dict[str, str]:
    return {e.request_id: e.reason for e in events if isinstance(e, Finished)}


def test_work_names_its_model() -> None:
    core = core_over(pool())
    for name, model in (("first", ""), ("same", "a"), ("other", "b")):
        assert core.submit(ask(name, model, 9, first=len(name))) == []
    plan, _ = step(core)
    assert {w.request_id: w.spec.model for w in plan.work} == {
        "first": "a",
        "same": "a",
        "other": "b",
    }


def test_each_model_has_its_own_last_token() -> None:
    core = core_over(pool())
    for name, model in (("x", "a"), ("y", "b")):
        core.submit(ask(name, model, 9))
    ended: dict[str, str] = {}
    for token in (EOS["a"], EOS["b"]):
        _, events = step(core, token)
        ended |= finished(events)
        assert set(ended) == ({"x"} if token == EOS["a"] else {"x", "y"})
    assert ended == {"x": "stop", "y": "stop"}


@pytest.mark.parametrize(
    ("model", "tokens", "first", "problem"),
    [
        ("b", 150, 5, "leaves no room for output in --max-model-len 100"),
        ("a", 150, 5, ""),
        ("a", 10, 45, "use ids from 0 to 49"),
        ("b", 10, 45, ""),
        ("c", 10, 5, "model=c: is not served; use a, b"),
    ],
)
def test_each_model_has_its_own_limits(model: str, tokens: int, first: int, problem: str) -> None:
    events = core_over(pool()).submit(ask("x", model, tokens, first=first))
    refusals = [event.message for event in events if isinstance(event, Finished)]
    assert [problem in message for message in refusals] == ([True] if problem else [])


@pytest.mark.parametrize(("model", "waits"), [("a", 0), ("b", 1)])
def test_a_request_waits_for_a_prefix_of_its_own_model_only(model: str, waits: int) -> None:
    core = core_over(pool())
    core.submit(ask("first", "b", 90))
    core.submit(ask("same", model, 90))
    step(core)
    plan, _ = step(core)
    assert [work.request_id for work in plan.work] == ["first", "same"][: 2 - waits]
    assert core.stats().rungs["wait_for_prefix"] == waits


def test_an_engine_of_one_model_knows_no_names() -> None:
    core = EngineCore(create_core(plan_layout(layers([0]), 1 * MIB)), Limits(), frozenset())
    (refusal,) = core.submit(ask("x", "a", 9))
    assert isinstance(refusal, Finished)
    assert "leave it out: there is one model" in refusal.message


def test_a_journal_of_several_models_replays() -> None:
    layout, journal = pool(600 * KIB), Journal()
    told = JournaledCore(core_over(layout), journal)
    for index in range(8):
        told.tell(ask(f"q{index}", "ab"[index % 2], 40 + index, outputs=30, first=index))
    plans = []
    while told.core.has_work:
        plans.append(told.plan())
        told.commit(StepResult(plans[-1].step, (9,) * plans[-1].num_logits))
    assert sum(len(plan.preempted) for plan in plans) > 0
    assert replay(journal.entries, core_over(layout)) == plans


def test_what_one_model_can_do_is_said_for_each() -> None:
    layout = pool()
    share = model_share("b", layout, 100)
    lines = make_contract("a", layout, 10 * MIB, 1 * MIB, 200, (share,)).lines()
    own = requests_that_fit(layout.seen_by("a"), 200)
    assert lines[0] == "memory contract for a, b"
    assert lines[-4:-2] == [
        "  longest request     200 tokens",
        f"  together            {own} requests of 200 tokens",
    ]
    assert lines[-2] == "  longest to b        100 tokens"
    assert lines[-1].startswith("  together to b       ")
    assert own == requests_that_fit(plan_layout(FULL, 1 * MIB), 200), "all of the pool"


def model(specs: list[LayerSpec], max_model_len: int = 10_000) -> PagedModel:
    description = SimpleNamespace(
        max_model_len=max_model_len, vocab_size=50, layers=specs, short_rope_tokens=0
    )
    return cast(PagedModel, SimpleNamespace(description=description))


@pytest.mark.parametrize(("name", "specs"), [("a", FULL), ("b", MIXED)])
def test_lengths_that_the_pool_allows_each(name: str, specs: list[LayerSpec]) -> None:
    layout = pool()
    limits = make_limits(layout, model(specs), EngineOptions(), None, name, [*FULL, *MIXED])
    assert limits.max_model_len == longest_request(layout.seen_by(name), 10_000, 64)
    wish = EngineOptions(max_model_len=9_000)
    with pytest.raises(ChangeSomething, match=f"one request of .* to {name}; use") as told:
        make_limits(layout, model(specs), wish, None, name, [*FULL, *MIXED])
    enough = int(told.value.remedy.split()[2].removesuffix("KiB")) * KIB
    roomy = pool(enough)
    assert make_limits(roomy, model(specs), wish, None, name, [*FULL, *MIXED])


def test_shares_that_were_cut_bind_each_model() -> None:
    layout = plan_layout([*FULL, *MIXED], 4 * MIB, manager="manual")
    whole = plan_layout([*FULL, *MIXED], 4 * MIB)
    for name in ("a", "b"):
        cut = longest_request(layout.seen_by(name), 100_000)
        assert 0 < cut < longest_request(whole.seen_by(name), 100_000)


@pytest.mark.parametrize(
    ("names", "options", "kind", "problem"),
    [
        (("a", "a"), EngineOptions(), GroupKind.FULL, "is the name of two models"),
        (("a", ""), EngineOptions(), GroupKind.FULL, "names no model"),
        (("a", "b"), EngineOptions(common_pool=True), GroupKind.FULL, "protects"),
        (("a", "b"), EngineOptions(), GroupKind.VISION, "takes images, and so does a"),
        (("a", "b"), EngineOptions(), GroupKind.CROSS, "takes images, and so does a"),
        (("a", "b"), EngineOptions(), GroupKind.DROPPING, "keeps a budget"),
    ],
)
def test_what_cannot_share_an_engine(
    names: tuple[str, str], options: EngineOptions, kind: GroupKind, problem: str
) -> None:
    specs = [LayerSpec(0, kind, 1, 16, 4)]
    models = [ServedModel(name, model(specs)) for name in names]
    with pytest.raises(ChangeSomething, match=problem):
        check_several(models, options)
    check_several(models[:1], replace(options, common_pool=True))
