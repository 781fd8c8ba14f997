"""The placement of a request that fits into an instance's memory, but not into what is free now.

It would wait until others have ended.  It comes with a placement over several instances if that
lets all of them together make more tokens, by the performance model (Infinite-LLM §5.1, §5.3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.steering.lending.algorithm import LoanPart, gains_together
from kvell.cluster.steering.lending.market import Creditor, Debtor
from kvell.cluster.steering.lending.model import PerformanceModel
from kvell.cluster.steering.lending.planner import kept_bytes, throughput_inputs
from kvell.cluster.steering.placements import Placement, placement, reading_of
from kvell.cluster.steering.relief import ROOM_PART
from kvell.cost.prices import ExecCosts
from kvell.vocabulary import RequestId


@dataclass(frozen=True, slots=True)
class ArrivingRequest:
    """A request that no instance has.

    :param tokens: prompt and output so far.
    :param blocks: sections of these and of the rest of the answer.
    """

    req_id: RequestId
    tokens: int
    blocks: int


def early_placement(
    request: ArrivingRequest,
    home: InstanceLoad,
    others: Sequence[InstanceLoad],
    model: Callable[[ExecCosts], PerformanceModel],
    coming: Mapping[str, int],
) -> Placement:
    """Return a placement that starts a request now; empty if waiting at ``home`` is better.

    Both sides keep what their running requests will grow by.  Creditors keep a part of their pools
    and the need of their lines too, so that they do not soon recall what they lend.

    :param others: instances whose sections ``home`` reads in the same way.
    :param coming: sections that instances are still to lend to earlier requests.
    """
    facts, load = home.report.facts, home.report.load
    if load is None or load.waiting:
        return ()
    spare_bytes = home.free_bytes - kept_bytes(home, load)
    most_local = min(spare_bytes // facts.section_bytes, request.blocks - 1)
    lenders: list[InstanceLoad] = []
    expected: dict[str, int] = {}
    for other in others:
        if (its := other.report.load) is not None:
            lenders.append(other)
            own_bytes = max(other.pool_bytes // ROOM_PART, its.growth_bytes + its.head_bytes)
            own_blocks = -(-own_bytes // other.report.facts.section_bytes)
            expected[other.instance_id] = coming.get(other.instance_id, 0) + own_blocks
    size = request.blocks, max(0, most_local)
    parts = placement(request.req_id, *size, home, lenders, facts.section_bytes, expected=expected)
    return parts if parts and _pays(request, parts, home, lenders, model) else ()


def _pays(
    request: ArrivingRequest,
    parts: Placement,
    home: InstanceLoad,
    others: Sequence[InstanceLoad],
    model: Callable[[ExecCosts], PerformanceModel],
) -> bool:
    """Return whether all make more tokens with the request running than with it waiting."""
    facts, load = home.report.facts, home.report.load
    assert load is not None
    by_name = {other.instance_id: other for other in others}
    here = sum(part.num_blocks for part in parts if part.local) * facts.section_bytes
    inputs = replace(
        throughput_inputs(home, facts, load, here),
        waiting=1,
        head_tokens=request.tokens,
        head_bytes=request.blocks * facts.section_bytes,
    )
    debtor = Debtor(home.instance_id, facts, model(facts.prices), inputs, (), request.blocks)
    away = [part for part in parts if part.num_blocks and not part.local]
    creditors = [
        LoanPart(_creditor(by_name[part.inst_id], model), part.num_blocks) for part in away
    ]
    first = by_name[away[0].inst_id].report.facts if away else None
    reading = reading_of(facts, first)
    return reading is not None and gains_together(debtor, creditors, reading)


def _creditor(memory: InstanceLoad, model: Callable[[ExecCosts], PerformanceModel]) -> Creditor:
    facts, load = memory.report.facts, memory.report.load
    assert load is not None
    inputs = throughput_inputs(memory, facts, load, memory.free_bytes)
    return Creditor(memory.instance_id, facts, model(facts.prices), inputs, 0, 0, 0)
