"""Routing policies: which of several instances gets a request (MemServe §6).

A router sees only the instances that may get a request now.  What it remembers is which instances
it chose before, so equal questions in an equal order have equal answers.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from kvell.cluster.routing.views import InstanceView, RequestView
from kvell.errors import ChangeSomething

ROUTINGS = ("least-load", "most-free-memory", "session", "round-robin")
"""Which instance gets a request: the one with the least outstanding work, with the most free KV
memory, where the conversation's prefixes are, or one after the other."""
DEFAULT_ROUTING = "least-load"

PROMPT_TOKENS_PER_OUTPUT_TOKEN = 4
"""An output token counts as so many prompt tokens.

A prompt's tokens share each reading of the weights by hundreds, an output token only with the
other requests of its step.  In the measured forward passes of SmolLM2 a token of a step of 8
requests costs 1.7 to 9.4 times as much as one of a prompt of 512 (the four machines of
``bench/results/*/forward_cpu.json``; their geometric mean is 3.3), and more in smaller steps.
"""


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
        ordered = sorted(instance_ids)
        behind = (one for one in ordered if one > self._last)
        self._last = next(behind, ordered[0])
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


def load(instance: InstanceView) -> int:
    """Return the outstanding work of an instance, in prompt tokens."""
    output = instance.outstanding_output_tokens * PROMPT_TOKENS_PER_OUTPUT_TOKEN
    return instance.outstanding_prompt_tokens + output


_ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    dict(zip(ROUTINGS, (LeastLoad, MostFreeMemory, BySession, RoundRobin), strict=True))
)


def router_named(name: str) -> Router:
    """Return a new router.

    :raises ChangeSomething: if there is no policy of this name.
    """
    if name not in _ROUTERS:
        remedy = f"use one of {', '.join(ROUTINGS)}"
        raise ChangeSomething("--routing", name, "is no routing policy", remedy)
    return _ROUTERS[name]()
