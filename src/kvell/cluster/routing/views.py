"""What a router sees: numbers that the front has counted, and nothing that it could change."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance that may get a request now: it serves, and neither its credits nor its slow
    start (:class:`kvell.cluster.routing.ramp.Ramp`) are used up.

    :param outstanding_prompt_tokens: prompt tokens that were submitted and, as far as the front
        knows, are not computed yet.
    :param outstanding_output_tokens: output tokens that requests in flight may still make.
    :param free_bytes: KV memory that nobody needs: what the instance said last, less what was
        submitted since.
    """

    instance_id: str
    incarnation: int
    outstanding_prompt_tokens: int
    outstanding_output_tokens: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that needs an instance.

    :param output_tokens: that it may make at most.
    :param session: equal for requests of one conversation; empty if it belongs to none.
    """

    prompt_tokens: int
    output_tokens: int
    session: str
