"""A router's view of instances and requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from kvell.cluster.routing.pace import PromptWork
from kvell.engine.protocol.statistics import InstanceReport

NO_HITS: Mapping[str, int] = MappingProxyType({})


class RoutableInstance(Protocol):
    """An instance that may get a request now: it serves, and neither its credits nor its slow
    start (:class:`kvell.cluster.routing.instance_pace.Ramp`) are used up."""

    @property
    def instance_id(self) -> str:
        """Name of the instance."""
        ...

    @property
    def report(self) -> InstanceReport:
        """The latest report of the instance itself."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free KV memory: as reported, less what was submitted since."""
        ...

    @property
    def outstanding_prompt_tokens(self) -> int:
        """Submitted prompt tokens that, as far as the front knows, are not computed yet."""
        ...

    @property
    def outstanding_output_tokens(self) -> int:
        """Output tokens that requests in flight may still make."""
        ...

    @property
    def uncached_prompt_tokens(self) -> int:
        """The prompt tokens that were not cached when they were routed."""
        ...

    @property
    def outstanding_pairs(self) -> int:
        """Pairs of query and key of these tokens (:func:`kvell.cost.prices.pairs`)."""
        ...

    def prompt_seconds(self, work: PromptWork) -> float:
        """Return what prompts take there, at its present pace
        (:class:`kvell.cluster.routing.pace.Pace`)."""
        ...

    @property
    def running_requests(self) -> int:
        """Number of requests that decode."""
        ...

    @property
    def num_coming(self) -> int:
        """Number of requests that are moving there."""
        ...

    @property
    def coming_tokens(self) -> int:
        """Tokens of these requests."""
        ...

    @property
    def held_tokens(self) -> int:
        """Prompts and output so far of all requests in flight: what the steps read once all
        prompts are computed."""
        ...


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that needs an instance.

    :param output_tokens: most tokens that it may make.
    :param session: equal for requests of one conversation; empty if it belongs to none.
    :param hits: number of tokens of the prompt that an instance could resume, by its id; instances
        that have none are left out.
    :param deadline_seconds: time until its first token is due; None: there is no deadline.
    """

    prompt_tokens: int
    output_tokens: int
    session: str
    hits: Mapping[str, int] = field(default_factory=lambda: NO_HITS)
    deadline_seconds: float | None = None
