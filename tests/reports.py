"""Reports of instances, for tests of what reads them."""

from dataclasses import dataclass, field

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.routing.pace import PromptWork
from kvell.cost.prices import USUAL_PRICES, ExecCosts
from kvell.engine.protocol.notices import IndexedGroup
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, LoadStats
from kvell.vocabulary import SECTION_TOKENS


def facts(
    credits: int = 4,  # noqa: A002 - the protocol's word
    incarnation: int = 0,
    *,
    pool_bytes: int = 0,
    token_bytes: int = 0,
    indexed: tuple[IndexedGroup, ...] = (),
    max_model_len: int = 0,
    reach_tokens: int = 0,
    section_bytes: int = 0,
    section_tokens: int = SECTION_TOKENS,
    host: str = "",
    prices: ExecCosts = USUAL_PRICES,
    is_asked: bool = False,
) -> InstanceFacts:
    return InstanceFacts(
        *(incarnation, credits, "m", max_model_len, pool_bytes),
        token_bytes=token_bytes,
        indexed=indexed,
        section_bytes=section_bytes,
        reach_tokens=reach_tokens,
        section_tokens=section_tokens,
        host=host,
        prices=prices,
        is_asked=is_asked,
    )


def load(
    free_bytes: int,
    pool_bytes: int,
    waiting: int = 0,
    *,
    running: int = 0,
    placements: tuple[RequestPlacementEntry, ...] = (),
    held_tokens: int = 0,
    waiting_tokens: int = 0,
    longest: tuple[RequestPlacementEntry, ...] = (),
    memory_waiting: int | None = None,
    head_tokens: int = 0,
    head_bytes: int = 0,
    growth_bytes: int = 0,
) -> LoadStats:
    """:param memory_waiting: None: all that wait."""
    return LoadStats(
        *(1, running, waiting, 9, 9, free_bytes, pool_bytes),
        placements=placements,
        held_tokens=held_tokens,
        waiting_tokens=waiting_tokens,
        longest=longest,
        memory_waiting=waiting if memory_waiting is None else memory_waiting,
        head_tokens=head_tokens,
        head_bytes=head_bytes,
        growth_bytes=growth_bytes,
    )


@dataclass(eq=False)
class Memory(InstanceLoad):
    """An instance's memory, as steering sees it."""

    instance_id: str = ""
    waiting: int = 0
    free_bytes: int = 0
    pool_bytes: int = 0
    num_leaving: int = 0
    num_coming: int = 0

    @property
    def memory_waiting(self) -> int:
        return self.waiting


@dataclass(eq=False)
class Party(Memory):
    report: InstanceReport = field(default_factory=lambda: InstanceReport(facts()))
    role: str = "mixed"
    can_take: bool = True
    work: int = 0


def party_of(line: InstanceLoad) -> Party:
    """As it is now, whatever comes to the line later."""
    memory = (line.waiting, line.free_bytes, line.pool_bytes, line.num_leaving, line.num_coming)
    return Party(line.instance_id, *memory, line.report, line.role, line.can_take, line.work)


@dataclass(eq=False)
class Routable(InstanceLoad):
    """An instance, as a router sees it."""

    instance_id: str = ""
    outstanding_prompt_tokens: int = 0
    outstanding_output_tokens: int = 0
    free_bytes: int = 0
    uncached_prompt_tokens: int = 0
    outstanding_pairs: int = 0
    running_requests: int = 0
    held_tokens: int = 0
    report: InstanceReport = field(default_factory=lambda: InstanceReport(facts()))
    num_coming: int = 0
    coming_tokens: int = 0
    slows: float = 1.0

    def prompt_seconds(self, work: PromptWork) -> float:
        return self.slows * work.priced_seconds(self.report.facts.prices)
