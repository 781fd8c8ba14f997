"""Instances as the planner of loans sees them, drawn."""

from hypothesis import strategies as st

from kvell.cluster.steering.lending.market import Creditor, Debtor
from kvell.cluster.steering.lending.model import PerformanceModel, ThroughputInputs
from kvell.cost.prices import ExecCosts
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.vocabulary import RequestId
from tests.reports import facts

SECTION, BLOCK = 512, 512_000
"""Tokens and bytes of a section."""
COSTS = ExecCosts()
COVERED = ExecCosts(away_token_seconds=0.0)
"""A creditor computes, in time: the paper's equation 6."""
FAR = ExecCosts(away_token_seconds=1.6e-6)
"""What is elsewhere is read ten times as slowly."""
ALL_COSTS = (COSTS, COVERED, FAR)
MODELS = tuple(PerformanceModel(costs) for costs in ALL_COSTS)
models = st.sampled_from(MODELS)

loads = st.builds(
    ThroughputInputs,
    batch=st.integers(0, 40),
    held_tokens=st.integers(0, 200_000),
    running_bytes=st.floats(1, 50 * BLOCK),
    waiting=st.integers(0, 30),
    head_tokens=st.floats(1, 60_000),
    head_bytes=st.floats(1, 60 * BLOCK),
    waiting_tokens=st.floats(1, 4_000),
    waiting_bytes=st.floats(1, 10 * BLOCK),
    spare_bytes=st.integers(-40 * BLOCK, 40 * BLOCK),
    away_tokens=st.integers(0, 20_000),
    lent_tokens=st.integers(0, 20_000),
    asked_tokens=st.integers(0, 20_000),
    asking=st.integers(0, 3),
)
limits = st.builds(
    facts,
    section_bytes=st.just(BLOCK),
    section_tokens=st.just(SECTION),
    host=st.sampled_from(["", "other"]),
    is_asked=st.booleans(),
)


def entries(name: str, counts: list[int]) -> tuple[RequestPlacementEntry, ...]:
    return tuple(
        RequestPlacementEntry(RequestId(f"{name}:{number}"), name, count, local=True)
        for number, count in enumerate(counts)
    )


@st.composite
def parties(draw: st.DrawFn) -> tuple[list[Debtor], list[Creditor]]:
    """Some of each, on two hosts."""
    debtors = [
        Debtor(
            f"d{number}",
            draw(limits),
            draw(models),
            draw(loads),
            entries(f"d{number}", draw(st.lists(st.integers(1, 60), max_size=3))),
            draw(st.integers(0, 50)),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    creditors = [
        Creditor(
            f"c{number}",
            draw(limits),
            draw(models),
            draw(loads),
            *draw(st.tuples(st.integers(-2, 60), st.integers(1, 60), st.integers(0, 50))),
        )
        for number in range(draw(st.integers(0, 4)))
    ]
    return debtors, creditors
