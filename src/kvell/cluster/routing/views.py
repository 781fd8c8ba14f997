"""A router's view of instances and requests: read-only numbers that the front has counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance that may get a request now: it serves, and neither its credits nor its slow
    start (:class:`kvell.cluster.routing.ramp.Ramp`) are used up.

    :param outstanding_prompt_tokens: submitted prompt tokens that, as far as the front knows, are
        not computed yet.
    :param outstanding_output_tokens: output tokens that requests in flight may still make.
    :param free_bytes: free KV memory: the last report of the instance, less what was submitted
        since.
    :param uncached_prompt_tokens: of the prompt tokens, those not cached when they were routed.
    :param outstanding_pairs: pairs of query and key that these tokens make
        (:func:`kvell.cluster.routing.costs.pairs`).
    :param running_requests: number of requests that decode.
    :param held_tokens: prompts and output so far of all requests in flight: what the steps read
        once all prompts are computed.
    """

    instance_id: str
    incarnation: int
    outstanding_prompt_tokens: int
    outstanding_output_tokens: int
    free_bytes: int
    uncached_prompt_tokens: int = 0
    outstanding_pairs: int = 0
    running_requests: int = 0
    held_tokens: int = 0


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
