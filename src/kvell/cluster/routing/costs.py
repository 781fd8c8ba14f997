"""The costs of prompts in seconds, for routing (MemServe §5.3, equations 1 and 2).

Each instance is priced by the prices that it reports (:class:`kvell.cost.prices.ExecCosts`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvell.cluster.routing.pace import RequestPrice
from kvell.cluster.routing.views import RequestView, RoutableInstance
from kvell.cost.prices import ExecCosts

LEAST_SECONDS = 1e-6
"""Least priced time of a first token, for prices of 0."""


def queues_seconds(instances: Sequence[RoutableInstance], request: RequestView) -> list[float]:
    """Return a request's wait on each instance before its own prompt: the first term of
    equation 1.

    Earlier prompts are computed first.  The tokens that the instance holds lengthen all steps:
    those of the earlier prompts, of the request's own and, by ``output_share``, of its answer.
    The answers of other requests are no delay by themselves, since requests decode together.
    If any request decodes, a step is half over when the request arrives.  One call prices all
    instances, because a request may have a thousand to choose from.
    """
    hits, tokens, output_tokens = request.hits, request.prompt_tokens, request.output_tokens
    waits: list[float] = []
    for instance in instances:
        costs = instance.report.facts.prices
        waiting = instance.uncached_prompt_tokens
        steps = 0.5 + costs.output_share * output_tokens
        steps += (waiting + tokens - hits.get(instance.instance_id, 0)) / costs.chunk_tokens
        seconds = steps * instance.held_tokens * costs.held_token_seconds
        if instance.running_requests:
            seconds += costs.request_seconds / 2
        waits.append(seconds + _prompts_seconds(instance, costs) if waiting else seconds)
    return waits


@dataclass(frozen=True)
class FirstToken:
    """When a request's first token comes.

    :param seconds: at the instance's present pace, from now on.
    :param priced: the same by prices, with what is done of it.
    """

    seconds: float
    priced: RequestPrice


def first_token(
    instance: RoutableInstance,
    prompt_tokens: int,
    hit: int,
    fetched: int = 0,
    elapsed_seconds: float = 0.0,
    crowd: int = 1,
) -> FirstToken:
    """Return when a request's first token comes: prompts go in turn, decodes share steps.

    :param fetched: tokens of the hit that are fetched from another instance.
    :param elapsed_seconds: time that the instance has worked on its present prompts.
    :param crowd: see :class:`.RequestPrice`.
    """
    costs = instance.report.facts.prices
    steps = -(-instance.uncached_prompt_tokens // costs.chunk_tokens)
    decoding = steps * instance.running_requests * costs.output_token_seconds
    prompt_seconds = costs.exec_seconds(prompt_tokens, hit, instance.running_requests)
    prompt_seconds += costs.fetch_seconds(fetched)
    earlier_seconds = _prompts_seconds(instance, costs) + decoding
    priced = RequestPrice(max(LEAST_SECONDS, earlier_seconds + prompt_seconds), crowd)
    pace = instance.pace(priced)
    left_seconds = max(0.0, pace * earlier_seconds - elapsed_seconds)
    return FirstToken(left_seconds + pace * prompt_seconds, priced)


def _prompts_seconds(instance: RoutableInstance, costs: ExecCosts) -> float:
    """Return the time to compute the waiting prompts, which share the fixed cost of steps."""
    tokens = instance.uncached_prompt_tokens
    return (
        -(-tokens // costs.chunk_tokens) * costs.request_seconds
        + tokens * costs.token_seconds
        + instance.outstanding_pairs * costs.pair_seconds
    )


def pull_or_recompute(
    prompt_tokens: int, chosen: str, hits: Mapping[str, int], costs: ExecCosts
) -> tuple[str, ...]:
    """Return the instances from which to fetch more of a prompt's history; none if computing it is
    quicker (MemServe §5.3, equation 2).

    :param chosen: the instance that computes the request.
    :param hits: number of tokens that each instance has.
    :param costs: prices of the chosen instance, which would fetch or compute.
    :returns: ids, the instance with the most history first, then by id.
    """
    cached_tokens = hits.get(chosen, 0)
    here_seconds = costs.exec_seconds(prompt_tokens, cached_tokens)
    paying: list[tuple[int, str]] = []
    decisions: dict[int, bool] = {}
    for name, tokens in hits.items():
        if tokens > cached_tokens:
            pays = decisions.get(tokens)
            if pays is None:
                there_seconds = costs.exec_seconds(prompt_tokens, tokens)
                pays = costs.fetch_seconds(tokens - cached_tokens) <= here_seconds - there_seconds
                decisions[tokens] = pays
            if pays:
                paying.append((-tokens, name))
    return tuple(name for _, name in sorted(paying))
