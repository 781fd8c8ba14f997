"""An instance: a process, here or elsewhere, at the other end of a socket."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvell.engine.protocol.messages import SCHEMA_VERSION, Command, Event, Ready
from kvell.errors import KvellError
from kvell.fleet.instance.instance_line import InstanceLine
from kvell.fleet.instance.redialing import Dial, Redial

STDERR_FD = 2
LAST_WORDS_SECONDS = 2.0
REFUSAL_SECONDS = 15.0
"""What a start that is refused may take to let go of all that it has read; a busy machine is slow.

Its exit status says whether the user must change something.
"""


class InstanceStartError(KvellError):
    """An instance process did not become ready.

    :param message: what happened, in one line.
    :param exit_code: the process's exit status where it ended by itself, else None;
        2 means that it has told the user on stderr what to change.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        self.exit_code = exit_code
        super().__init__(message)


@dataclass(frozen=True)
class LaunchPlan:
    """What one start of an instance is given beside its socket.

    :param incarnation: tells this start from all others; drawn at random.
    :param values: of further ``{name}`` arguments of the command line.
    :param inherited_fds: descriptors that the child keeps open.
    """

    incarnation: int
    values: Mapping[str, str] = field(default_factory=dict)
    inherited_fds: tuple[int, ...] = ()


def filled_in(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command line with arguments like ``{name}`` replaced, as far as they have values."""
    in_braces = {f"{{{name}}}": value for name, value in values.items()}
    return [in_braces.get(argument, argument) for argument in command]


async def hear_ready(line: InstanceLine, deadline_seconds: float) -> Ready | None:
    """The first event, which must be :class:`Ready` in our schema version; None if the line ends.

    :raises InstanceStartError: when it is late or of another version.
    :raises ProtocolError: when it is not the protocol.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            first = await line.first()
    except TimeoutError as error:
        problem = f"the instance was not ready within {deadline_seconds:g} s"
        raise InstanceStartError(problem) from error
    if first is None or (isinstance(first, Ready) and first.schema_version == SCHEMA_VERSION):
        return first
    raise InstanceStartError(
        f"the instance speaks another protocol; this front needs version {SCHEMA_VERSION}"
    )


def said_last(problem: str, words: str) -> str:
    """A problem, and the last line of what an instance wrote at its end."""
    last = next(iter(words.strip().splitlines()[::-1]), "")
    return f"{problem}: {last}" if last else problem


class Running(Protocol):
    """A process that was started: asyncio's, or one on another machine."""

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        ...

    async def wait(self) -> int:
        """Its exit status, once it has ended; below 0 it is the signal that ended it."""
        ...

    def kill(self) -> None:
        """End it at once.

        :raises ProcessLookupError: when it has ended.
        """
        ...


class InstanceProcess:
    """One incarnation: it has been started, and is over when :meth:`follow` ends.

    :param host: where it runs; "" is this machine.
    :param address: where it listens for other fronts; "" if it has this one alone.
    :param last_words: what it wrote at its end, where nobody reads its terminal.
    :param dial: connects again to this incarnation; None: it ends with its connection.
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

        The child gets a session of its own: an interrupt typed at the front's terminal
        must drain it, not kill it.  It ends by itself when the front's end closes.

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
            ours.close()  # upon which the process ends
            raise InstanceStartError(f"cannot connect to {command[0]}: {error}") from error
        return cls(process, line)

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command; credits bound what can be queued."""
        self._line.send(command)

    async def follow(self, tell: Callable[[Event], None]) -> None:
        """Tell everything the instance says, until it closes its end.

        :raises ProtocolError: when it says something that is not the protocol.
        """
        await self._line.follow(tell)

    async def reconnect(
        self, looks: int, look_seconds: float, startup_seconds: float
    ) -> Ready | None:
        """Connect again behind the end of a connection that the process may have outlived.

        :returns: what it says of itself; None if it has ended, or is not reached.
        """
        if self._dial is None:
            return None
        self._line.hang_up()
        found = await Redial(
            self._dial,
            lambda line: hear_ready(line, startup_seconds),
            self._process.wait,
            looks,
            look_seconds,
        ).run()
        if found is None:
            return None
        self._line, ready = found
        return ready

    async def wait_ready(self, deadline_seconds: float) -> Ready:
        """The first event, which must be :class:`Ready` in our schema version.

        :raises InstanceStartError: when it ends, is late or speaks another version.
        """
        ready = await hear_ready(self._line, deadline_seconds)
        if ready is None:
            code = await self.end(REFUSAL_SECONDS)
            problem = f"the instance ended before it was ready (exit {code})"
            raise InstanceStartError(said_last(problem, self._last_words()), code)
        return ready

    def hang_up(self) -> None:
        """End the connection, and leave the process alone."""
        self._line.hang_up()

    async def end(self, grace_seconds: float = LAST_WORDS_SECONDS) -> int:
        """Close our end, wait for the process, kill it when it lingers; its exit status."""
        self._line.hang_up()
        try:
            async with asyncio.timeout(grace_seconds):
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """End the process at once; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._line.hang_up()
        return await self._process.wait()
