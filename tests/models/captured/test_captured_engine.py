"""Engines whose decode steps are recorded: answers and journals of engines that compute them."""

from random import Random

import pytest

from kvell.engine.protocol.messages import AskStats
from kvell.engine.protocol.statistics import Stats
from kvell.models.captured.passes import SlotStep, StepRecords
from kvell.models.captured.reasons import RECORDED, Reason
from kvell.models.captured.slots import DecodeRows
from kvell.vocabulary import KIB, MIB
from tests.models.captured.fake_graphs import FakeGraphs
from tests.models.captured.families import FAMILIES
from tests.models.captured.served import PREFIX, Served
from tests.models.harness import prompt_ids

GREEDY, RANDOM = 0.0, 1.0


def traffic(served: Served, chance: Random, most_outputs: int = 8) -> None:
    """Requests that come and go, some with a prefix that hits, some with random tokens."""
    for wave in range(2):
        for number in range(3):
            name = f"{wave}.{number}"
            prompt = PREFIX * (number % 2) + prompt_ids(5 + 9 * number, seed=number + 7 * wave)
            temperature = RANDOM if number == 2 else GREEDY
            served.submit(
                name, prompt, chance.randint(most_outputs // 2, most_outputs), temperature
            )
        served.run()


def equal(
    architecture: str, depth: int, graphs: FakeGraphs, kv_bytes: int = 8 * MIB, outputs: int = 8
) -> Served:
    recorded = Served(architecture, graphs, depth, kv_bytes)
    computed = Served(architecture, None, depth, kv_bytes)
    for served in (recorded, computed):
        traffic(served, Random(depth), outputs)
    assert recorded.journal.entries == computed.journal.entries
    return recorded


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_answers_and_journals_are_those_of_computed_steps(
    architecture: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seated = list[bool]()
    step = StepRecords.step

    def spied(one: StepRecords, decode: DecodeRows) -> SlotStep | None:
        seated.append(decode.sources is not None)
        return step(one, decode)

    monkeypatch.setattr(StepRecords, "step", spied)
    graphs = FakeGraphs(Random(depth))
    served = equal(architecture, depth, graphs)
    assert served.model.captured is not None
    counts = served.model.captured.counts
    assert counts[RECORDED] == graphs.replays > 5
    (stats,) = served.engine.handle(AskStats())
    assert isinstance(stats, Stats) and stats.device_steps == counts
    assert any(seated) == (depth > 0), "the device knows the tokens of the step before"
    assert set(counts) <= {RECORDED, Reason.PREFILL, Reason.CHECKPOINTS}


@pytest.mark.parametrize(
    ("records", "asked", "depth"),
    [(True, None, 1), (True, 0, 0), (False, None, 0), (False, 1, 1)],
)
def test_steps_are_planned_ahead_by_default_where_they_are_recorded(
    records: bool, asked: int | None, depth: int
) -> None:
    served = Served("LlamaForCausalLM", FakeGraphs() if records else None, asked, 8 * MIB)
    assert served.engine.core.limits.depth == depth
    lines = " ".join(served.engine.contract.lines())
    assert ("planned while the previous step runs" in lines) == (depth > 0)
    served.engine.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_waits_at_random_moments(seed: int) -> None:
    """The pool holds two requests: others wait, and some are computed twice."""
    served = equal("LlamaForCausalLM", 1, FakeGraphs(Random(seed)), 96 * KIB, outputs=56)
    assert served.engine.core.stats().rungs["preempt"] > 0
