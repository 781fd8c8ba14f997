"""The instances of a front: its own, or those of a cluster's manager."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.messages import AskStats, Command, Event, Heartbeat, ResetPrefixCache
from kvell.engine.protocol.pages import LargePage, Pages
from kvell.engine.protocol.statistics import InstanceFacts, InstanceReport, Stats
from kvell.errors import InstanceDied, TryLater
from kvell.fleet.instance.watch import Watch

InstanceState = Literal[
    "starting", "serving", "restarting", "failing", "draining", "failed", "gone"
]
"""The state of an instance; only one that is ``serving`` takes requests.  ``failing``: it was
restarted in vain too often for requests to wait, and restarts continue; ``failed``: the user must
change something first; ``gone``: it was drained and has ended."""
GIVEN_UP: frozenset[InstanceState] = frozenset(("failing", "failed"))
"""States of an instance that no request waits for."""

CLOSING = InstanceDeath("the server is shutting down", "closing")
DRAINED = InstanceDeath("the instance was taken out of service", "drained")


@dataclass(frozen=True)
class MemberStatus:
    """The status of an instance, for operators.

    :param instance_id: such as ``mixed-0``.
    :param role: current role; ``mixed`` prefills and decodes.
    :param state: stage between its start and its end.
    :param pid: of the process; None while there is none.
    :param host: machine that the instance runs on; "" is the front's.
    :param restarts: number of restarts so far.
    :param report: what it has reported of itself; None before it was ready.
    """

    instance_id: str
    role: str
    state: InstanceState
    pid: int | None
    restarts: int
    report: InstanceReport | None
    host: str = ""

    @property
    def pid_here(self) -> int | None:
        """The process id if it is one of this machine, where its size can be read."""
        return None if self.host else self.pid


class Handle(Protocol):
    """The connection to an instance: its :class:`.Supervisor`, or an :class:`.InstanceLink` to an
    instance that the manager of a cluster owns.

    ``pid`` is None and ``host`` "" while no process is up.
    """

    @property
    def state(self) -> InstanceState: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def host(self) -> str: ...

    @property
    def restarts(self) -> int: ...

    def send(self, command: Command) -> None:
        """Queue a command for the instance.

        :raises InstanceDied: when no process is up.
        :raises ProtocolError: when the command is too long for a frame.
        """
        ...


H_co = TypeVar("H_co", bound=Handle, covariant=True)


def _ignore(*_words: str | int) -> None:
    """Do nothing."""


@dataclass(frozen=True)
class MemberCallbacks:
    """The callbacks for events of an instance; the first argument is its id.

    :param on_cut: the connection ended; ``on_lost`` follows with the cause.
    :param on_role: the instance has a role from now on.
    :param on_move: the manager moves a request, the first argument, to an instance; or, if the
        number is not 0, that many sections of it.
    """

    on_ready: Callable[[str, InstanceFacts], None]
    on_event: Callable[[str, Event], None]
    on_lost: Callable[[str, InstanceDeath], None]
    on_given_up: Callable[[str], None]
    on_leaving: Callable[[str], None]
    on_gone: Callable[[str], None]
    on_cut: Callable[[str], None] = _ignore
    on_role: Callable[[str, str], None] = _ignore
    on_move: Callable[[str, str, int], None] = _ignore


class Member(Generic[H_co]):
    """An instance, as the listener of its supervisor, which the maker of both sets."""

    supervisor: H_co

    def __init__(self, instance_id: str, role: str, fleet: "Fleet[Handle]") -> None:
        self.instance_id, self.role = instance_id, role
        self.incarnation = 0
        self.report: InstanceReport | None = None
        self._fleet, self._callbacks = fleet, fleet.callbacks
        self._stats_waiter: asyncio.Future[Stats] | None = None
        self.watch = Watch(lambda command: self.supervisor.send(command))  # noqa: PLW0108 - set later

    @property
    def is_serving(self) -> bool:
        return self.supervisor.state == "serving"

    @property
    def is_given_up(self) -> bool:
        return self.supervisor.state in GIVEN_UP

    def status(self) -> MemberStatus:
        supervisor = self.supervisor
        return MemberStatus(
            self.instance_id,
            self.role,
            supervisor.state,
            supervisor.pid,
            supervisor.restarts,
            self.report,
            supervisor.host,
        )

    async def stats(self, deadline_seconds: float, *, with_audit: bool = False) -> Stats:
        """Ask the instance for its counters; concurrent callers share one answer.

        An audit is asked for separately, after the answer that others wait for.

        :raises InstanceDied: when the instance does not serve now.
        :raises TryLater: when the instance does not answer in time.
        """
        waiter = self._stats_waiter
        if with_audit and waiter is not None:
            await asyncio.wait([waiter], timeout=deadline_seconds)
            waiter = self._stats_waiter
            if waiter is not None:
                raise TryLater("too many requests for the instance's statistics; retry in a moment")
        if waiter is None:
            self.supervisor.send(AskStats(with_audit))
            waiter = self._stats_waiter = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([waiter], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance gave no statistics within {deadline_seconds:g} s")
        return waiter.result()

    def forget_prefixes(self) -> bool:
        """Have the instance evict its cached prefixes before any later request; return True."""
        self.supervisor.send(ResetPrefixCache())
        return True

    def instance_ready(self, facts: InstanceFacts) -> None:
        """Handle an incarnation that can serve; called again after each reconnection."""
        self.report = InstanceReport(facts)
        self._fleet.on_ready(self.instance_id, facts)

    def instance_said(self, event: Event) -> None:
        """Answer callers with statistics and pages, and pass all other events on."""
        if isinstance(event, Stats):
            if self._stats_waiter is not None:
                self._stats_waiter.set_result(event)
                self._stats_waiter = None
            return
        if isinstance(event, Pages | LargePage):
            self.watch.on_answer(event)
            return
        if isinstance(event, Heartbeat) and self.report is not None:
            self.report = InstanceReport(self.report.facts, event.load)
        self._callbacks.on_event(self.instance_id, event)

    def instance_lost(self, death: InstanceDeath) -> None:
        """Handle the end of the incarnation, which sends nothing more."""
        if self.report is not None:
            self.report = InstanceReport(self.report.facts)
        if self._stats_waiter is not None:
            self._stats_waiter.set_exception(InstanceDied(death.problem))
            self._stats_waiter.exception()  # read once: perhaps no caller waits any more
            self._stats_waiter = None
        self.watch.lost(death.problem)
        self._callbacks.on_lost(self.instance_id, death)

    def instance_given_up(self) -> None:
        """Stop waiting for the instance; called again after each restart in vain."""
        self._callbacks.on_given_up(self.instance_id)

    def instance_cut(self) -> None:
        self._callbacks.on_cut(self.instance_id)


async def stats_of(
    members: Sequence[Member[Handle]], deadline_seconds: float, *, with_audit: bool
) -> dict[str, Stats]:
    """Return the counters of each instance that answers in time, by id.

    :param members: at least one instance.
    :raises InstanceDied: when an instance dies meanwhile.
    :raises TryLater: when no instance answers in time.
    """
    calls = (member.stats(deadline_seconds, with_audit=with_audit) for member in members)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    counters: dict[str, Stats] = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, Stats):
            counters[member.instance_id] = answer
        elif not isinstance(answer, TryLater):
            raise answer
    if not counters:
        raise next(answer for answer in answers if isinstance(answer, TryLater))
    return counters


class Fleet(Generic[H_co]):
    """The instances of a front, by id: its own, or those of a cluster's manager.

    :ivar outlives_front: whether the instances keep running after the front has ended.
    """

    outlives_front = False

    def __init__(self, callbacks: MemberCallbacks) -> None:
        self.callbacks = callbacks
        self._by_id: dict[str, Member[H_co]] = {}

    def __iter__(self) -> Iterator[Member[H_co]]:
        return iter(list(self._by_id.values()))

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._by_id

    def __getitem__(self, instance_id: str) -> Member[H_co]:
        return self._by_id[instance_id]

    def on_ready(self, instance_id: str, facts: InstanceFacts) -> None:
        self.callbacks.on_ready(instance_id, facts)

    @abstractmethod
    async def start(self, counts: Mapping[str, int]) -> None:
        """Wait until the first instances are ready.

        :raises InstanceStartError: when an instance does not become ready.
        """

    @abstractmethod
    def scale(self, counts: Mapping[str, int]) -> "asyncio.Future[None]":
        """Add or drain instances until each role in ``counts`` has its number; do not wait.

        Failed instances are replaced.  Those that serve stay; of these the youngest are drained
        first.

        :returns: done once the cluster's manager has answered, or immediately without one.
        :raises ChangeSomething: when there is no memory for more, a role has no instance, or the
            manager refuses.
        :raises TryLater: when the cluster's manager does not answer.
        """

    @abstractmethod
    def drain(self, instance_id: str) -> "asyncio.Future[None]":
        """Take an instance out of service; returns and raises like :meth:`scale`.

        :raises ChangeSomething: when no instance has this id, or no other one serves.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the instances, or disconnect from those of a manager."""
