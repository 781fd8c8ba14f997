"""Routing policies, which choose one of several instances for a request (MemServe §6).

A router sees only the instances that may get a request now.  It remembers only its own choices, so
the same sequence of requests and views always has the same choices.

The choice of the instance that continues a request whose prompt another one has computed.

Its pages there need no transfer (MemServe §5.1, PD-Caching-2), but each request that it decodes
makes its steps longer.  Both are seconds, by the prices of each instance.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvell.cluster.instance_load import InstanceLoad
from kvell.cluster.routing.costs import RequestView, first_token_seconds, queues_seconds
from kvell.cost.prices import PROMPT_TOKENS_PER_OUTPUT_TOKEN, pairs
from kvell.errors import ChangeSomething

ROUTINGS = (
    "least-load",
    "most-free-memory",
    "session",
    "longest-prefix",
    "prompt-tree",
    "round-robin",
)
"""Ways to choose a request's instance.  least-load: least outstanding work.  most-free-memory: most
free KV memory.  session: where the conversation's prefixes are.  longest-prefix: most of the prompt
cached.  prompt-tree: earliest first token.  round-robin: in turn."""
DEFAULT_ROUTING = "least-load"

COMPUTE_WEIGHT = 3
"""Seconds of waiting that a second of computing is worth; measured in ``bench/routing``."""
MOST_SESSIONS = 65_536
"""Sessions whose instance is remembered: some ten megabytes of the front's memory."""


class Router(Protocol):
    """A policy that chooses an instance for each request."""

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return the id of one of ``instances``, which are not empty."""
        ...


class RoundRobin:
    """A policy that takes the instances in turn, in order of their ids.

    It remembers an id, not a position, so that instances may come and go between two turns.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        return self.next_of(view.instance_id for view in instances)

    def next_of(self, instance_ids: Iterable[str]) -> str:
        all_ids = list(instance_ids)
        self._last = min([name for name in all_ids if name > self._last] or all_ids)
        return self._last


class LeastLoad:
    """A policy that takes the instance with the least outstanding work in tokens; equals in turn.

    It counts tokens, not requests: one long prompt is as much work as many short ones.
    """

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return an instance with the least load; the request adds the same load to each."""
        least = min(map(load, instances))
        return self._turn.next_of(view.instance_id for view in instances if load(view) == least)


class MostFreeMemory:
    """A policy that takes the instance with the most free KV memory; of equals, the least load."""

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return an instance with the most free bytes."""
        most = max(view.free_bytes for view in instances)
        freest = [view for view in instances if view.free_bytes == most]
        return self._least_load.choose(request, freest)


class BySession:
    """A policy that sends the requests of a session to one instance, which has its prefixes.

    Another instance would compute the prompt again, so a session moves only if that is less work
    than waiting: if the load of its instance exceeds another's by more than the request's prompt.
    It also moves while its instance may get no request.  A new session, and a request without one,
    goes to the least loaded instance.  Only the most recent sessions are remembered.
    """

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._least_load = LeastLoad()
        self._most_sessions = most_sessions
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return the session's instance, or the one with the least load."""
        if not request.session:
            return self._least_load.choose(request, instances)
        home = self._homes.get(request.session, "")
        least = min(map(load, instances))
        if not any(
            view.instance_id == home and load(view) - least <= request.prompt_tokens
            for view in instances
        ):
            home = self._least_load.choose(request, instances)
        self._remember(request.session, home)
        return home

    def _remember(self, session: str, home: str) -> None:
        self._homes[session] = home
        self._homes.move_to_end(session)
        if len(self._homes) > self._most_sessions:
            self._homes.popitem(last=False)


class LongestPrefix:
    """A policy that takes the instance with the longest cached prefix; of equals, the least loaded.

    It saves the most work of all, but a popular prefix floods the instance that has it: others
    compute the prefix only while that instance may get no request.
    """

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return an instance with the longest hit; without any, the one with the least load."""
        hits = request.hits
        longest = max((hits.get(view.instance_id, 0) for view in instances), default=0)
        if longest:
            instances = [view for view in instances if hits.get(view.instance_id, 0) == longest]
        return self._least_load.choose(request, instances)


class PromptTreeBased:
    """A policy that takes the instance that is done first with its work, and with the part of the
    prompt that it has not cached (MemServe, equation 1).

    Both terms are seconds, by the prices of each instance, so a popular prefix does not flood the
    instance that has it.  Computing has a higher weight than waiting: it delays this request and
    also those that come after it.  But computing what other instances have makes a copy.  The more
    instances have a text, the more requests ask for it, and the more of them the next copy serves.
    So its price is divided by the number of instances that have it: a conversation stays at its
    instance, and examples that all prompts begin with are soon at all instances.  Equal prices go
    in turn.  A request with a deadline avoids instances that would miss it, if another would not.

    :param weight: seconds of waiting that a second of computing is worth.
    """

    def __init__(self, weight: float = COMPUTE_WEIGHT) -> None:
        self._weight = weight
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return an instance with the lowest price, among those that meet the deadline."""
        if request.deadline_seconds is not None:
            prompt, until_seconds = request.prompt_tokens, request.deadline_seconds
            ends = ((v, request.hits.get(v.instance_id, 0)) for v in instances)
            in_time = [v for v, hit in ends if first_token_seconds(v, prompt, hit) <= until_seconds]
            instances = in_time or instances
        charged = self._charged(request)
        hits = request.hits
        prices: list[float] = []
        for view, queue in zip(instances, queues_seconds(instances, request), strict=True):
            costs = view.report.facts.prices
            tokens, read = charged[hits.get(view.instance_id, 0)]
            seconds = costs.request_seconds + tokens * costs.token_seconds
            prices.append(queue + self._weight * (seconds + read * costs.pair_seconds))
        least = min(prices)
        return self._turn.next_of(
            view.instance_id
            for view, price in zip(instances, prices, strict=True)
            if price == least
        )

    def _charged(self, request: RequestView) -> Mapping[int, tuple[float, float]]:
        """Return the computed tokens and pairs that a request pays for, by its cached tokens.

        It pays for each once, divided by the number of instances that have it.
        """
        prompt_tokens = request.prompt_tokens
        holders = Counter(request.hits.values())
        tokens = read = 0.0
        longer_new = longer_pairs = copies = 0
        charged: dict[int, tuple[float, float]] = {}
        for hit in sorted({0, *holders}, reverse=True):
            new = max(1, prompt_tokens - hit)
            new_pairs = pairs(prompt_tokens, hit)
            tokens += (new - longer_new) / max(1, copies)
            read += (new_pairs - longer_pairs) / max(1, copies)
            charged[hit] = (tokens, read)
            longer_new = new
            longer_pairs = new_pairs
            copies += holders[hit]
        return charged


def load(instance: InstanceLoad) -> int:
    """Return the outstanding work of an instance, in prompt tokens."""
    output = instance.outstanding_output_tokens * PROMPT_TOKENS_PER_OUTPUT_TOKEN
    return instance.outstanding_prompt_tokens + output


_ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    dict(
        zip(
            ROUTINGS,
            (LeastLoad, MostFreeMemory, BySession, LongestPrefix, PromptTreeBased, RoundRobin),
            strict=True,
        )
    )
)


def router_named(name: str) -> Router:
    """Return a new router.

    :raises ChangeSomething: if there is no policy of this name.
    """
    if name not in _ROUTERS:
        remedy = f"use one of {', '.join(ROUTINGS)}"
        raise ChangeSomething("--routing", name, "is not a routing policy", remedy)
    return _ROUTERS[name]()


class EarliestEnd:
    """A policy that takes the instance where a request's answer ends first; equals in turn."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[InstanceLoad]) -> str:
        """Return the instance with the shortest transfer and answer together.

        Requests that are on their way to an instance lengthen its steps like those that it has.
        """
        seconds = {view.instance_id: end_seconds(view, request) for view in instances}
        least = min(seconds.values())
        return self._turn.next_of(name for name, end in seconds.items() if end == least)


def end_seconds(instance: InstanceLoad, request: RequestView) -> float:
    """Return the time until an instance has fetched a request's missing pages and answered it."""
    costs = instance.report.facts.prices
    missing_tokens = max(0, request.prompt_tokens - request.hits.get(instance.instance_id, 0))
    batch = 1 + instance.running_requests + instance.num_coming
    held_tokens = request.prompt_tokens + instance.held_tokens + instance.coming_tokens
    step_seconds = costs.step_seconds(batch, held_tokens)
    return costs.fetch_seconds(missing_tokens) + request.output_tokens * step_seconds
