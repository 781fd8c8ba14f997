"""Routing policies: which of several instances gets a request (MemServe §6).

A router sees only the instances that may get a request now.  What it remembers is which instances
it chose before, so equal questions in an equal order have equal answers.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvell.cluster.routing.costs import PROMPT_TOKENS_PER_OUTPUT_TOKEN, ExecCosts
from kvell.cluster.routing.views import InstanceView, RequestView
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
    """Chooses an instance for each request."""

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return the id of one of the instances, of which there is at least one."""
        ...


class RoundRobin:
    """Each instance in turn, in order of their ids.

    It remembers an id, not a position, so that the turn goes on when instances come and go.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return the instance that follows the one chosen last."""
        return self.next_of(one.instance_id for one in instances)

    def next_of(self, instance_ids: Iterable[str]) -> str:
        """Return the first id behind the one chosen last, or the first of all."""
        all_ids = list(instance_ids)
        self._last = min([one for one in all_ids if one > self._last] or all_ids)
        return self._last


class LeastLoad:
    """The instance with the least outstanding work, in tokens; those with equal work in turn.

    It counts tokens, not requests: one long prompt is as much work as many short ones.
    """

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return an instance with the least load; the request adds the same to each."""
        least = min(map(load, instances))
        return self._turn.next_of(one.instance_id for one in instances if load(one) == least)


class MostFreeMemory:
    """The instance with the most free KV memory; of those with equally much, the least load."""

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return an instance with the most free bytes."""
        most = max(one.free_bytes for one in instances)
        freest = [one for one in instances if one.free_bytes == most]
        return self._least_load.choose(request, freest)


class BySession:
    """Requests of a session go to one instance, which has the prefixes of earlier turns.

    Another instance would compute the prompt again, so a session moves only where that is less
    work than waiting at home: when the load of home exceeds another's by more than the request's
    prompt.  It also moves while its home may get no request.  A new session, and a request without
    one, goes where the load is least.  The sessions asked for last are remembered.
    """

    def __init__(self, most_sessions: int = MOST_SESSIONS) -> None:
        self._least_load = LeastLoad()
        self._most_sessions = most_sessions
        self._homes: OrderedDict[str, str] = OrderedDict()

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return the session's instance, or the one with the least load."""
        if not request.session:
            return self._least_load.choose(request, instances)
        home = self._homes.get(request.session, "")
        least = min(map(load, instances))
        if not any(
            one.instance_id == home and load(one) - least <= request.prompt_tokens
            for one in instances
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
    """The instance with the most of the prompt cached; of those with equally much, the least load.

    It saves the most work of all, and lets a popular prefix flood the instance that has it: others
    get it only when the one that has it may get no request.
    """

    def __init__(self) -> None:
        self._least_load = LeastLoad()

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return an instance with the longest hit; without any, the one with the least load."""
        hits = request.hits
        longest = max((hits.get(one.instance_id, 0) for one in instances), default=0)
        if longest:
            instances = [one for one in instances if hits.get(one.instance_id, 0) == longest]
        return self._least_load.choose(request, instances)


class PromptTreeBased:
    """The instance that is done soonest: with what it has to do, and with what it lacks of the
    prompt (MemServe, equation 1).

    Both are seconds, so a popular prefix does not flood the instance that has it.  What is computed
    counts several times: it delays this request once, and those that come after it too.  Computing
    again what others have makes a copy, though.  The more instances have a text, the more requests
    ask for it, and the more of them the next copy serves.  So its price is divided by the instances
    that have it: a conversation stays where it is, and examples that all prompts begin with are
    soon everywhere.  Equal prices go in turn.  A request that is due is kept from instances that
    would be late, if any would not.

    :param weight: seconds of waiting that a second of computing is worth.
    """

    def __init__(self, costs: ExecCosts | None = None, weight: float = COMPUTE_WEIGHT) -> None:
        self._costs, self._weight = costs or ExecCosts(), weight
        self._turn = RoundRobin()

    def choose(self, request: RequestView, instances: Sequence[InstanceView]) -> str:
        """Return an instance with the least price, of those that are in time."""
        if request.deadline_seconds is not None:
            instances = self._in_time(request, request.deadline_seconds, instances) or instances
        by_hit, hits = self._by_hit(request), request.hits
        queues = self._costs.queues_seconds(instances, request)
        prices = [
            queue + by_hit[hits.get(one.instance_id, 0)]
            for one, queue in zip(instances, queues, strict=True)
        ]
        least = min(prices)
        return self._turn.next_of(
            one.instance_id for one, price in zip(instances, prices, strict=True) if price == least
        )

    def _by_hit(self, request: RequestView) -> Mapping[int, float]:
        """What computing the prompt counts, by the tokens of it that are cached."""
        tokens, holders = request.prompt_tokens, Counter(request.hits.values())
        price, shorter_seconds, copies, found = 0.0, 0.0, 0, dict[int, float]()
        for hit in sorted({0, *holders}, reverse=True):
            seconds = self._costs.exec_seconds(tokens, hit)
            price += self._weight * (seconds - shorter_seconds) / max(1, copies)
            found[hit] = price
            shorter_seconds, copies = seconds, copies + holders[hit]
        return found

    def _in_time(
        self, request: RequestView, deadline_seconds: float, instances: Sequence[InstanceView]
    ) -> list[InstanceView]:
        first, tokens, hits = self._costs.first_token_seconds, request.prompt_tokens, request.hits
        return [
            one
            for one in instances
            if first(one, tokens, hits.get(one.instance_id, 0)) <= deadline_seconds
        ]


def load(instance: InstanceView) -> int:
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


def router_named(name: str, costs: ExecCosts | None = None) -> Router:
    """Return a new router.

    :param costs: of the instances' model, for the one that reckons in seconds.
    :raises ChangeSomething: if there is no policy of this name.
    """
    if name not in _ROUTERS:
        remedy = f"use one of {', '.join(ROUTINGS)}"
        raise ChangeSomething("--routing", name, "is no routing policy", remedy)
    return PromptTreeBased(costs) if name == "prompt-tree" else _ROUTERS[name]()
