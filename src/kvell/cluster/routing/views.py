"""What a router sees: numbers that the front has counted, and nothing that it could change."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance that may get a request now: it serves, and neither its credits nor its slow
    start (:class:`kvell.cluster.routing.ramp.Ramp`) are used up.

    :param outstanding_prompt_tokens: prompt tokens that were submitted and, as far as the front
        knows, are not computed yet.
    :param outstanding_output_tokens: output tokens that requests in flight may still make.
    :param free_bytes: KV memory that nobody needs: what the instance said last, less what was
        submitted since.
    :param outstanding_prompts: requests submitted whose prompt is not computed yet.
    :param uncached_prompt_tokens: of their tokens, those not cached when they were routed.
    :param outstanding_pairs: pairs of query and key that these tokens make
        (:func:`kvell.cluster.routing.costs.pairs`).
    :param running_requests: requests that decode.
    :param held_tokens: of all that it has in flight, prompts and what was made of answers: what
        its steps read, once all prompts are computed.
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

    :param output_tokens: that it may make at most.
    :param session: equal for requests of one conversation; empty if it belongs to none.
    :param hits: tokens of the prompt behind which an instance could resume, by its id; an instance
        that has nothing of it is left out.
    :param deadline_seconds: from now until its first token is due; None if nobody waits for it.
    """

    prompt_tokens: int
    output_tokens: int
    session: str
    hits: Mapping[str, int] = field(default_factory=lambda: NO_HITS)
    deadline_seconds: float | None = None
