"""The costs of prompts in seconds, for routing (MemServe §5.3, equations 1 and 2).

Each instance is priced by the prices that it reports (:class:`kvell.cost.prices.ExecCosts`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from types import MappingProxyType

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.routing.pace import PromptWork
from kvell.cost.prices import ExecCosts, pairs

ANSWER_STEPS = 1.5
"""Steps until an instance that decodes has sent pages: half of the present one, and another one."""
MOST_SOURCES = 16
"""Most instances that are compared as sources of a prompt's history."""


NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request that needs an instance.

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


def queues_seconds(instances: Sequence[InstanceLoad], request: RequestView) -> list[float]:
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
        if waiting:
            seconds += (
                -(-waiting // costs.chunk_tokens) * costs.request_seconds
                + waiting * costs.token_seconds
                + instance.outstanding_pairs * costs.pair_seconds
            )
        waits.append(seconds)
    return waits


def prompt_work(instance: InstanceLoad, prompt_tokens: int, hit: int) -> PromptWork:
    costs = instance.report.facts.prices
    new = max(1, prompt_tokens - hit)
    decoding = instance.running_requests * costs.output_token_seconds
    steps_seconds = costs.request_seconds + -(-new // costs.chunk_tokens) * decoding
    return PromptWork(steps_seconds, new, pairs(prompt_tokens, hit))


def first_token_seconds(
    instance: InstanceLoad,
    prompt_tokens: int,
    hit: int,
    fetch_seconds: float = 0.0,
    done_seconds: float = 0.0,
) -> float:
    """Return when a request's first token comes, from now on: prompts go in turn, decodes share
    steps.

    :param fetch_seconds: time until pages from another instance are here; earlier prompts are
        computed meanwhile.
    :param done_seconds: of the present prompts' time, what is over.
    """
    own_seconds = instance.prompt_seconds(prompt_work(instance, prompt_tokens, hit))
    left_seconds = 0.0
    if instance.uncached_prompt_tokens:
        left_seconds = instance.prompt_seconds(_waiting_work(instance)) - done_seconds
    return max(0.0, fetch_seconds, left_seconds) + own_seconds


def answer_seconds(instance: InstanceLoad, done_seconds: float) -> float:
    """Return the time until an instance has sent pages of a text: it handles messages between its
    steps, so the transfer waits for the rest of its present step and for one more.

    :param done_seconds: of the present prompts' time, what is over.
    """
    costs = instance.report.facts.prices
    running, tokens = instance.running_requests, instance.uncached_prompt_tokens
    if not tokens:
        step_seconds = costs.step_seconds(running, instance.held_tokens)
        return ANSWER_STEPS * step_seconds if running else 0.0
    seconds = instance.prompt_seconds(_waiting_work(instance))
    two_steps = min(1.0, 2 * costs.chunk_tokens / tokens)
    return min(two_steps * seconds, max(0.0, seconds - done_seconds))


def _waiting_work(instance: InstanceLoad) -> PromptWork:
    costs = instance.report.facts.prices
    tokens = instance.uncached_prompt_tokens
    decoding = instance.running_requests * costs.output_token_seconds
    steps_seconds = -(-tokens // costs.chunk_tokens) * (costs.request_seconds + decoding)
    return PromptWork(steps_seconds, tokens, instance.outstanding_pairs)


def pull_or_recompute(
    prompt_tokens: int,
    chosen: str,
    hits: Mapping[str, int],
    costs: ExecCosts,
    waits: Callable[[str], float] = lambda _: 0.0,
) -> str:
    """Return the instance from which to fetch more of a prompt's history; "" if computing it is
    quicker (MemServe §5.3, equation 2).

    :param hits: number of tokens that each instance has.
    :param costs: prices of the chosen instance, which would fetch or compute.
    :param waits: returns the time until an instance has sent pages, beside what they take.  Of
        many instances only those that would save the most are looked at.
    """
    cached_tokens = hits.get(chosen, 0)
    here_seconds = costs.exec_seconds(prompt_tokens, cached_tokens)
    saved: dict[int, float] = {}
    for tokens in set(hits.values()):
        if tokens > cached_tokens:
            saved[tokens] = here_seconds - costs.exec_seconds(prompt_tokens, tokens)
            saved[tokens] -= costs.fetch_seconds(tokens - cached_tokens)
    paying = ((-saved[n], name) for name, n in hits.items() if saved.get(n, -1.0) >= 0)
    best = 0.0
    source = ""
    for cost, name in nsmallest(MOST_SOURCES, paying):
        if source and -cost <= best:
            break
        left_seconds = -cost - waits(name)
        if left_seconds >= 0 and (not source or left_seconds > best):
            best, source = left_seconds, name
    return source
