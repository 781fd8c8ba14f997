"""An instance process, on this machine or another, at the other end of a socket.

A process of a cluster listens for fronts and the manager, which dial it.  After a cut it is dialed
again before it counts as dead.

::

    cut ──dials, for n looks──► reached ──waits──► Ready
     │                            └────────────────────────┐
     └── the process ends, or is not reached ──► nothing ◄─┘
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from kvell.engine.protocol.codec import decode_event, encode_frame
from kvell.engine.protocol.messages import (
    KEEP_ALIVE_SECONDS,
    SCHEMA_VERSION,
    Command,
    Event,
    KeepAlive,
    Ready,
)
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import KvellError
from kvell.wire.endpoints import connected_to
from kvell.wire.frames import MessageLine, ProtocolError
from kvell.wire.greeting import GREETING_SECONDS, Greeting
from kvell.wire.session import Opening, Purpose


class InstanceLine(MessageLine[Event]):
    """A line that keeps events until :meth:`follow` is called."""

    def __init__(self) -> None:
        super().__init__(decode_event)
        self._kept: list[Event] = []
        self._heard = asyncio.Event()
        self._breach: ProtocolError | None = None
        self.hear = self._keep

    async def first(self) -> Event | None:
        """Return the first event; None if the line ends before it.

        :raises ProtocolError: when the first message breaks the protocol.
        """
        await self._heard.wait()
        if self._kept:
            return self._kept.pop(0)
        if self._breach is not None:
            raise self._breach
        return None

    async def follow(self, hear: Callable[[Event], None]) -> None:
        """Pass every event to ``hear``, kept ones first, until the line ends.

        :raises ProtocolError: when a message breaks the protocol.
        """
        kept, self._kept, self.hear = self._kept, [], hear
        for event in kept:
            hear(event)
        await self.ended.wait()
        if self._breach is not None:
            raise self._breach

    def send(self, command: Command) -> None:
        """Queue a command; credits bound what can be queued.

        :raises ProtocolError: when the command is too long for a frame.
        """
        self.send_frame(encode_frame(command))

    @override
    def data_received(self, data: bytes) -> None:
        if self._breach is None:
            super().data_received(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._heard.set()

    def broken(self, problem: ProtocolError) -> None:
        self._breach = problem
        self._heard.set()
        self.ended.set()

    def _keep(self, event: Event) -> None:
        self._kept.append(event)
        self._heard.set()


class DialedLine(InstanceLine):
    """A line that also sends keep-alives to the instance, until the line ends."""

    _timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._keep_alive()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _keep_alive(self) -> None:
        self.send(KeepAlive())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEEP_ALIVE_SECONDS, self._keep_alive)


async def dial(
    address: str, greeting: Greeting, secret: bytes, purpose: Purpose
) -> tuple[socket.socket, Greeting]:
    """Connect to a process of the cluster; both sides prove that they have the secret.

    No thread is used, so processes that do not answer block nothing else.

    :param address: like ``tcp://10.0.0.1:5000``.
    :returns: a non-blocking connection, and the identity of the peer.
    :raises OSError: when no process answers there in time.
    :raises ProtocolError: when the peer does not belong to this cluster.
    :raises ChangeSomething: when the peer runs another release, or the address is invalid.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(GREETING_SECONDS):
        sock = await connected_to(address)
        try:
            opening = Opening(greeting, secret, purpose)
            message = opening.hello
            while True:
                await loop.sock_sendall(sock, message)
                if opening.met is not None:
                    return sock, opening.met
                received = await loop.sock_recv(sock, opening.wanted_bytes)
                if not received:
                    raise ProtocolError("the peer closed the connection")
                message = opening.hear(received)
        except BaseException:
            sock.close()
            raise


async def dial_instance(
    address: str, greeting: Greeting, secret: bytes, instance: str, incarnation: int
) -> DialedLine:
    """Return a line to an incarnation of an instance, which listens at the address.

    :raises OSError: when no process answers there in time.
    :raises ProtocolError: when another instance or incarnation answers.
    """
    sock, peer = await dial(address, greeting, secret, "commands")
    if (peer.instance, peer.incarnation) != (instance, incarnation):
        sock.close()
        raise ProtocolError(f"another instance answers at {address}: {peer.instance}")
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(DialedLine, sock=sock)
    return line


FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0

Reached = TypeVar("Reached")


class Pauses:
    """Pauses between attempts: none before the first, then growing ones up to a bound."""

    def __init__(self) -> None:
        self._next_seconds = 0.0

    def next_seconds(self) -> float:
        pause = self._next_seconds
        self._next_seconds = min(LONGEST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
        return pause

    def reset(self) -> None:
        self._next_seconds = 0.0


async def reach(
    dialing: Coroutine[Any, Any, Reached], hang_up: Callable[[Reached], None]
) -> Reached:
    """Await a connection attempt.  If the caller is cancelled, the connection is closed once it is
    established.

    :raises OSError, ProtocolError: as of the attempt.
    """
    task = asyncio.create_task(dialing)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hang_up_after(task, hang_up)
        raise


def hang_up_after(task: "asyncio.Future[Reached]", hang_up: Callable[[Reached], None]) -> None:
    def drop(done: "asyncio.Future[Reached]") -> None:
        if not done.cancelled() and done.exception() is None:
            hang_up(done.result())

    task.add_done_callback(drop)


Dial = Callable[[], Awaitable[InstanceLine]]
"""Connects to the same incarnation; raises OSError or KvellError when it does not answer."""
HearReady = Callable[[InstanceLine], Awaitable[InstanceFacts | None]]
"""Returns the facts in the first event of a connection, as :func:`.hear_ready` does."""


_Awaited = asyncio.Future[InstanceLine] | asyncio.Future[InstanceFacts | None] | asyncio.Future[int]


class Redial:
    """One attempt to reconnect to a process.

    Looks are counted, not seconds, so that a caller that was itself stopped loses none.

    :param exited: waits for the end of the process, wherever it runs.
    :param look_seconds: time for which a dial is awaited before the next look.
    """

    def __init__(
        self,
        dial: Dial,
        hear_ready: HearReady,
        exited: Callable[[], Awaitable[int]],
        looks: int,
        look_seconds: float,
    ) -> None:
        self._dial, self._hear_ready, self._exited = dial, hear_ready, exited
        self._looks, self._look_seconds = looks, look_seconds
        self._exit: asyncio.Future[int] | None = None

    async def run(self) -> tuple[InstanceLine, InstanceFacts] | None:
        """Return the new connection; None if the process has ended, or is not reached."""
        try:
            while (line := await self._reached()) is not None:
                facts = await self._ready(line)
                if facts is not None:
                    return line, facts
                line.abort()
                await self._wait(most_seconds=self._look_seconds)
            return None
        finally:
            if self._exit is not None:
                self._exit.cancel()

    async def _reached(self) -> InstanceLine | None:
        dialing: asyncio.Future[InstanceLine] | None = None
        try:
            while self._looks > 0 and not (self._exit and self._exit.done()):
                self._looks -= 1
                dialing = dialing or asyncio.ensure_future(self._dial())
                await self._wait(dialing, most_seconds=self._look_seconds)
                # Not earlier: an unreachable machine does not show that the process has ended.
                self._exit = self._exit or asyncio.ensure_future(self._exited())
                if not dialing.done():
                    continue
                try:
                    return dialing.result()
                except (OSError, KvellError):
                    dialing = None
                await self._wait(most_seconds=self._look_seconds)
            return None
        finally:
            if dialing is not None and not dialing.done():
                hang_up_after(dialing, InstanceLine.abort)

    async def _ready(self, line: InstanceLine) -> InstanceFacts | None:
        """Return the facts, which may follow a long step; None if the instance hangs up."""
        hearing = asyncio.ensure_future(self._hear_ready(line))
        try:
            await self._wait(hearing, most_seconds=None)
            return hearing.result() if hearing.done() else None
        except KvellError:
            self._looks = 0
            return None
        finally:
            hearing.cancel()

    async def _wait(self, *awaited: _Awaited, most_seconds: float | None) -> None:
        """Wait for the first of these futures, or the end of the process."""
        waited = awaited if self._exit is None else (*awaited, self._exit)
        await asyncio.wait(waited, timeout=most_seconds, return_when=asyncio.FIRST_COMPLETED)


STDERR_FD = 2
LAST_WORDS_SECONDS = 2.0
REFUSAL_SECONDS = 15.0
"""Time for a start that is refused to free what it has read, which is long on a busy machine.

The exit status of such a start says whether the user must change something.
"""


class InstanceStartError(KvellError):
    """The error of an instance process that did not become ready.

    :param message: problem, in one line.
    :param exit_code: exit status of a process that ended by itself, else None; 2 means that stderr
        has what the user must change.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        self.exit_code = exit_code
        super().__init__(message)


@dataclass(frozen=True)
class LaunchPlan:
    """The values of one start of an instance, apart from its socket.

    :param values: of further ``{name}`` arguments of the command line.
    :param inherited_fds: descriptors that the child keeps open.
    """

    incarnation: int
    values: Mapping[str, str] = field(default_factory=dict)
    inherited_fds: tuple[int, ...] = ()


def filled_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    in_braces = {f"{{{name}}}": value for name, value in values.items()}
    return [in_braces.get(argument, argument) for argument in command]


async def hear_ready(line: InstanceLine, deadline_seconds: float) -> InstanceFacts | None:
    """Return the facts in the first event, a ``Ready``; None if the line ends.

    :raises InstanceStartError: when the event is late or of another version.
    :raises ProtocolError: when the message breaks the protocol.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            first = await line.first()
    except TimeoutError as error:
        problem = f"the instance was not ready within {deadline_seconds:g} s"
        raise InstanceStartError(problem) from error
    if first is None:
        return None
    if isinstance(first, Ready) and first.schema_version == SCHEMA_VERSION:
        return first.facts
    raise InstanceStartError(
        f"the instance speaks another protocol; this front needs version {SCHEMA_VERSION}"
    )


def said_last(problem: str, words: str) -> str:
    last = next(iter(words.strip().splitlines()[::-1]), "")
    return f"{problem}: {last}" if last else problem


class InstanceProcess:
    """One incarnation of an instance, from its start until its line ends for good.

    :param wait: returns the exit status once the process has ended; a negative one is a signal.
    :param kill: kills the process; raises ProcessLookupError when it has ended.
    :param host: the machine that it runs on; "" is this machine.
    :param address: where it listens for other fronts; "" if it does not.
    :param last_words: returns the last lines that it wrote, if no terminal shows them.
    :param dial: reconnects to this incarnation; None: it ends with its connection.
    """

    def __init__(
        self,
        pid: int,
        wait: Callable[[], Awaitable[int]],
        kill: Callable[[], None],
        line: InstanceLine,
        host: str = "",
        address: str = "",
        *,
        last_words: Callable[[], str] = str,
        dial: Dial | None = None,
    ) -> None:
        self.pid, self._wait, self._kill = pid, wait, kill
        self._dial = dial
        self.line = line
        self.host, self.address = host, address
        self._last_words = last_words

    @classmethod
    async def launch(cls, command: Sequence[str], plan: LaunchPlan) -> "InstanceProcess":
        """Start a child that inherits its end of a socket pair.

        ``{socket_fd}``, ``{incarnation}`` and the plan's names are filled in.

        The child gets a session of its own, because an interrupt at the front's terminal must drain
        it, not kill it.  It ends by itself when the front's end closes.

        :raises InstanceStartError: when the program cannot be started.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise InstanceStartError(f"cannot start {command[0]}: {error}") from error
        values = {"socket_fd": str(theirs.fileno()), "incarnation": str(plan.incarnation)}
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *filled_in(command, values | dict(plan.values)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=STDERR_FD,
                    pass_fds=(theirs.fileno(), *plan.inherited_fds),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise InstanceStartError(f"cannot start {command[0]}: {error}") from error
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            _, line = await loop.create_unix_connection(InstanceLine, sock=ours)
        except OSError as error:
            ours.close()  # which ends the process
            raise InstanceStartError(f"cannot connect to {command[0]}: {error}") from error
        return cls(process.pid, process.wait, process.kill, line)

    async def reconnect(
        self, looks: int, look_seconds: float, startup_seconds: float
    ) -> InstanceFacts | None:
        """Reconnect after a connection ended that the process may have survived.

        :returns: the facts of the instance; None if the process has ended, or is not reached.
        """
        if self._dial is None:
            return None
        self.line.hang_up()
        connection = await Redial(
            self._dial,
            lambda line: hear_ready(line, startup_seconds),
            self._wait,
            looks,
            look_seconds,
        ).run()
        if connection is None:
            return None
        self.line, facts = connection
        return facts

    async def wait_ready(self, deadline_seconds: float) -> InstanceFacts:
        """Return the facts of the instance, once it can serve.

        :raises InstanceStartError: when the instance ends, is late or has another version.
        """
        facts = await hear_ready(self.line, deadline_seconds)
        if facts is None:
            code = await self.end(REFUSAL_SECONDS)
            problem = f"the instance ended before it was ready (exit {code})"
            raise InstanceStartError(said_last(problem, self._last_words()), code)
        return facts

    async def end(self, grace_seconds: float = LAST_WORDS_SECONDS) -> int:
        """Close the connection, wait for the process or kill it, and return its exit status."""
        self.line.hang_up()
        try:
            async with asyncio.timeout(grace_seconds):
                return await self._wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._kill()
        self.line.hang_up()
        return await self._wait()


class Site(Protocol):
    """A place that starts instances; the front does not know where they run."""

    def enter(self, instance_id: str) -> None:
        """Announce an instance that will be started, perhaps many times."""
        ...

    def leave(self, instance_id: str) -> None:
        """Give back the room of an instance that is gone for good."""
        ...

    async def find(self) -> dict[str, int]:
        """Return the instances that an earlier manager has started here.

        :returns: the incarnation of each instance that runs; 0 for one that does not run.
        """
        ...

    async def rejoin(self, instance_id: str) -> InstanceProcess | None:
        """Connect to the incarnation that :meth:`find` has returned.

        :returns: None if there was none, it does not answer, or it was connected to before.
        """
        ...

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        """Start an incarnation and connect to it; the caller waits until it is ready.

        :param command: its command line, in which the plan's names and the site's are filled in.
        :raises InstanceStartError: when it cannot be started, or ends before it connects.
        """
        ...

    def check_room(self, contracts: Iterable[tuple[int | None, int]], further: int) -> None:
        """Check that there is room for further instances like those that serve.

        :param contracts: the process id and ``contract_bytes`` of each that serves.
        :raises ChangeSomething: if there is certainly none.
        """
        ...

    async def close(self) -> None:
        """Free what the instances shared, once they have ended."""
        ...
