"""Memory cores of either implementation: the compiled one, and the oracle in plain Python."""

from typing import Literal

from kvell import memory
from kvell.memory import Eviction, Layout, VisibleCore
from kvell.prefix.eviction.hazard import capacity_tokens
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.eviction.hazard_rule import LearnedHazard

Implementation = Literal["compiled", "oracle"]
BOTH: tuple[Implementation, ...] = ("oracle", "compiled")


def create_core(
    layout: Layout, implementation: Implementation = "compiled", eviction: Eviction = "lru"
) -> VisibleCore:
    if implementation == "compiled":
        return memory.create_core(layout, eviction)
    rule = LearnedHazard(capacity_tokens(layout)) if eviction == "hazard" else None
    return ReferenceCore(layout, rule)
