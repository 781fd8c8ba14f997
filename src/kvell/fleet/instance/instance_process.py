"""An instance process, on this machine or another, at the other end of a socket."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvell.engine.protocol.messages import SCHEMA_VERSION, Command, Event, Ready
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import KvellError
from kvell.fleet.instance.dialing import Dial, InstanceLine, Redial

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

    :param incarnation: identifies this start.
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


class Running(Protocol):
    """A process that was started: asyncio's, or one on another machine."""

    @property
    def pid(self) -> int:
        """The process id, on the process's machine."""
        ...

    async def wait(self) -> int:
        """Return the exit status once the process has ended; a negative status is a signal."""
        ...

    def kill(self) -> None:
        """Kill the process.

        :raises ProcessLookupError: when it has ended.
        """
        ...


class InstanceProcess:
    """One incarnation of an instance, from its start until :meth:`follow` ends.

    :param host: the machine that it runs on; "" is this machine.
    :param address: where it listens for other fronts; "" if it does not.
    :param last_words: returns the last lines that it wrote, if no terminal shows them.
    :param dial: reconnects to this incarnation; None: it ends with its connection.
    """

    def __init__(
        self,
        process: Running,
        line: InstanceLine,
        host: str = "",
        address: str = "",
        *,
        last_words: Callable[[], str] = str,
        dial: Dial | None = None,
    ) -> None:
        self._process = process
        self._dial = dial
        self._line = line
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
        return cls(process, line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command; credits bound what can be queued."""
        self._line.send(command)

    async def follow(self, tell: Callable[[Event], None]) -> None:
        """Pass every event to ``tell``, until the instance closes its end.

        :raises ProtocolError: when a message breaks the protocol.
        """
        await self._line.follow(tell)

    async def reconnect(
        self, looks: int, look_seconds: float, startup_seconds: float
    ) -> InstanceFacts | None:
        """Reconnect after a connection ended that the process may have survived.

        :returns: the facts of the instance; None if the process has ended, or is not reached.
        """
        if self._dial is None:
            return None
        self._line.hang_up()
        connection = await Redial(
            self._dial,
            lambda line: hear_ready(line, startup_seconds),
            self._process.wait,
            looks,
            look_seconds,
        ).run()
        if connection is None:
            return None
        self._line, facts = connection
        return facts

    async def wait_ready(self, deadline_seconds: float) -> InstanceFacts:
        """Return the facts of the instance, once it can serve.

        :raises InstanceStartError: when the instance ends, is late or has another version.
        """
        facts = await hear_ready(self._line, deadline_seconds)
        if facts is None:
            code = await self.end(REFUSAL_SECONDS)
            problem = f"the instance ended before it was ready (exit {code})"
            raise InstanceStartError(said_last(problem, self._last_words()), code)
        return facts

    def hang_up(self) -> None:
        self._line.hang_up()

    async def end(self, grace_seconds: float = LAST_WORDS_SECONDS) -> int:
        """Close the connection, wait for the process or kill it, and return its exit status."""
        self._line.hang_up()
        try:
            async with asyncio.timeout(grace_seconds):
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._line.hang_up()
        return await self._process.wait()
