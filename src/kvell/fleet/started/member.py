"""One instance of a front: its supervisor, what it said of itself, and its statistics."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.engine.protocol.messages import (
    AskStats,
    Command,
    Event,
    Heartbeat,
    Ready,
    ResetPrefixCache,
)
from kvell.engine.protocol.pages import LargePage, Pages
from kvell.engine.protocol.statistics import Stats
from kvell.errors import InstanceDied, TryLater
from kvell.fleet.instance.death import InstanceDeath
from kvell.fleet.instance.supervisor import GIVEN_UP, InstanceState
from kvell.fleet.started.watch import Watch
from kvell.wire.greeting import new_incarnation


@dataclass(frozen=True)
class MemberStatus:
    """What operators see of an instance.

    :param instance_id: its name, like ``mixed-0``.
    :param role: what it does; ``mixed`` prefills and decodes.
    :param state: where it is between its start and its end.
    :param pid: of its process; None while it has none.
    :param host: the machine that it runs on; "" is the front's.
    :param restarts: how often it was started again.
    :param ready: what it said at its start; None before.
    :param beat: its last heartbeat; None before the first.
    """

    instance_id: str
    role: str
    state: InstanceState
    pid: int | None
    restarts: int
    ready: Ready | None
    beat: Heartbeat | None
    host: str = ""

    @property
    def pid_here(self) -> int | None:
        """The process's id if it is one of this machine, which can say how large it is."""
        return None if self.host else self.pid


class Handle(Protocol):
    """What keeps the connection to an instance: its :class:`.Supervisor`, or a link to one that
    the manager of a cluster keeps."""

    @property
    def state(self) -> InstanceState:
        """Where the instance is; only one that is ``serving`` takes requests."""
        ...

    @property
    def pid(self) -> int | None:
        """Of its process; None while none is up."""
        ...

    @property
    def host(self) -> str:
        """The machine that it runs on; "" is the front's, or none."""
        ...

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command for the instance.

        :raises InstanceDied: when none is up just now.
        :raises ProtocolError: when the command is too long for a frame.
        """
        ...


@dataclass(frozen=True)
class MemberCallbacks:
    """What is called when something happens to an instance; the first argument is its id.

    :param on_cut: the connection to it ended; ``on_lost`` follows once it is known why.
    :param on_role: it has a role from now on.
    :param on_move: the manager lets a request, the first argument, go on at an instance; or, if
        that is not 0, so many of its sections lie there.
    """

    on_ready: Callable[[str, Ready], None]
    on_event: Callable[[str, Event], None]
    on_lost: Callable[[str, InstanceDeath], None]
    on_given_up: Callable[[str], None]
    on_leaving: Callable[[str], None]
    on_gone: Callable[[str], None]
    on_cut: Callable[[str], None]
    on_role: Callable[[str, str], None]
    on_move: Callable[[str, str, int], None]


class Member:
    """Listens to its supervisor, which is set by the maker of both."""

    supervisor: Handle

    def __init__(self, instance_id: str, role: str, callbacks: MemberCallbacks) -> None:
        self.instance_id, self.role = instance_id, role
        self.incarnation = 0
        self.ready: Ready | None = None
        self.beat: Heartbeat | None = None
        self._callbacks = callbacks
        self._stats_waiter: asyncio.Future[Stats] | None = None
        self.watch = Watch(self._send)

    @property
    def is_serving(self) -> bool:
        """Whether it takes requests."""
        return self.supervisor.state == "serving"

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for it."""
        return self.supervisor.state in GIVEN_UP

    def next_incarnation(self) -> int:
        """Draw the incarnation of the next start; earlier ones have lower numbers."""
        self.incarnation = max(new_incarnation(), self.incarnation + 1)
        return self.incarnation

    def status(self) -> MemberStatus:
        """What operators see."""
        one = self.supervisor
        return MemberStatus(
            *(self.instance_id, self.role, one.state, one.pid, one.restarts),
            *(self.ready, self.beat, one.host),
        )

    async def stats(self, deadline_seconds: float, *, with_audit: bool = False) -> Stats:
        """Ask the instance for its counters; callers at the same time share one answer.

        An audit is asked for anew, behind the answer that others wait for.

        :raises InstanceDied: when it does not serve just now.
        :raises TryLater: when it does not answer in time.
        """
        waiter = self._stats_waiter
        if with_audit and waiter is not None:
            await asyncio.wait([waiter], timeout=deadline_seconds)
            waiter = self._stats_waiter
            if waiter is not None:
                raise TryLater("others ask the instance for statistics; come back in a moment")
        if waiter is None:
            self.supervisor.send(AskStats(with_audit))
            waiter = self._stats_waiter = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([waiter], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance gave no statistics within {deadline_seconds:g} s")
        return waiter.result()

    def forget_prefixes(self) -> bool:
        """Have the instance evict its cached prefixes, before any request that is sent later."""
        self.supervisor.send(ResetPrefixCache())
        return True

    def _send(self, command: Command) -> None:
        self.supervisor.send(command)

    def instance_ready(self, ready: Ready) -> None:
        """Keep what a new incarnation says of itself."""
        self.ready, self.beat = ready, None
        self._callbacks.on_ready(self.instance_id, ready)

    def instance_said(self, event: Event) -> None:
        """Keep heartbeats and statistics, and pass everything else on."""
        if isinstance(event, Stats):
            if self._stats_waiter is not None:
                self._stats_waiter.set_result(event)
                self._stats_waiter = None
            return
        if isinstance(event, Pages | LargePage):
            self.watch.heard(event)
            return
        if isinstance(event, Heartbeat):
            self.beat = event
        self._callbacks.on_event(self.instance_id, event)

    def instance_lost(self, death: InstanceDeath) -> None:
        """End the wait of those who asked it something."""
        self.beat = None
        if self._stats_waiter is not None:
            self._stats_waiter.set_exception(InstanceDied(death.problem))
            self._stats_waiter.exception()  # read once: perhaps nobody waits any more
            self._stats_waiter = None
        self.watch.lost(death.problem)
        self._callbacks.on_lost(self.instance_id, death)

    def instance_given_up(self) -> None:
        """Pass it on."""
        self._callbacks.on_given_up(self.instance_id)


async def stats_of(
    members: Sequence[Member], deadline_seconds: float, *, with_audit: bool
) -> dict[str, Stats]:
    """Counters of every one that answers in time, by id; ``members`` are not none.

    :raises InstanceDied: when one died meanwhile and none answers.
    :raises TryLater: when none answers in time.
    """
    asked = (one.stats(deadline_seconds, with_audit=with_audit) for one in members)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    told: dict[str, Stats] = {}
    for member, answer in zip(members, answers, strict=True):
        if isinstance(answer, Stats):
            told[member.instance_id] = answer
        elif not isinstance(answer, TryLater):
            raise answer
    if not told:
        raise next(answer for answer in answers if isinstance(answer, TryLater))
    return told
