"""The supervisor of one instance: starts it, watches it, and restarts it after a death.

::

    starting ──Ready──► serving ──retire──► draining ──ended──► gone
        │                  │ ▲
        │ exit 2           │ └──Ready── restarting ──attempts used up──► failing ──Ready──► serving
        └──► failed        └──dies, hangs, breaks the protocol──► restarting
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvell.cluster.routed_request import InstanceDeath
from kvell.engine.protocol.messages import (
    HEARTBEAT_SECONDS,
    Command,
    Drain,
    Event,
    Heartbeat,
    Tokens,
)
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.errors import InstanceDied, KvellError
from kvell.fleet.fleet import InstanceState, Member
from kvell.fleet.instance.instance_process import InstanceLine, InstanceProcess, InstanceStartError
from kvell.wire.frames import ProtocolError

SENT_BY_OTHERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def death_of(exit_code: int) -> InstanceDeath:
    """Return the death of a process with this exit status; a negative status is a signal."""
    problem = f"the instance process ended unexpectedly (exit {exit_code})"
    is_others = exit_code == 0 or -exit_code in SENT_BY_OTHERS
    return InstanceDeath(problem, "killed" if is_others else "crash")


MOST_DOUBLINGS = 64


@dataclass(frozen=True)
class RestartPolicy:
    """Bounded exponential back-off, without an end.

    :param first_seconds: the pause before the first restart.
    :param longest_seconds: the longest pause.
    :param attempts: restarts in a row without a step, after which requests wait no longer.
    """

    first_seconds: float = 0.1
    longest_seconds: float = 10.0
    attempts: int = 6

    def pause_seconds(self, fruitless_restarts: int) -> float:
        """Return the pause before the next restart."""
        doublings = min(fruitless_restarts, MOST_DOUBLINGS)
        return min(self.longest_seconds, self.first_seconds * 2.0**doublings)


TICKS = 8
"""Number of looks at an instance within its deadline."""
QUIET_HEARTBEATS = 4
"""Heartbeats in a row that an instance has missed if it is quiet."""


class Watchdog:
    """A counter of looks at an instance since its last event.

    It counts looks, not seconds: a front that was itself stopped looks once when it continues, and
    does not mistake its own absence for its instances' silence.
    """

    def __init__(self, deadline_seconds: float) -> None:
        self.interval_seconds = deadline_seconds / TICKS
        self._silent_looks = 0

    @property
    def is_quiet(self) -> bool:
        silent_seconds = (self._silent_looks - 1) * self.interval_seconds
        return silent_seconds >= QUIET_HEARTBEATS * HEARTBEAT_SECONDS

    def beat(self) -> None:
        self._silent_looks = 0

    def look(self) -> bool:
        """Count a look, due every ``interval_seconds``; return whether the deadline has passed."""
        self._silent_looks += 1
        return self._silent_looks > TICKS

    async def follow(
        self,
        line: InstanceLine,
        hear: Callable[[Event], None],
        end: Callable[[], Awaitable[object] | None],
    ) -> ProtocolError | bool:
        """Pass the events of a connection to ``hear``, until it ends.

        :param end: ends the connection, called when the deadline has passed.
        :returns: the violation that ended the connection, or whether it was silent for too long.
        """
        is_silent = False

        async def watch() -> None:
            nonlocal is_silent
            while not self.look():
                await asyncio.sleep(self.interval_seconds)
            is_silent = True
            if (ending := end()) is not None:
                await ending

        watching = asyncio.create_task(watch())
        try:
            await line.follow(hear)
        except ProtocolError as error:
            return error
        finally:
            watching.cancel()
        return is_silent


logger = logging.getLogger(__name__)

USER_MUST_CHANGE = 2
"""Exit status of an instance that has written to stderr what the user must change."""


class Supervisor:
    """The owner of one instance: starts it, follows it, and restarts it when it dies.

    :param launch: starts a process on any machine; called once for each incarnation.
    :param silence_seconds: an instance that is silent for this long is killed.
    :ivar settled: set once the instance is ready, or its first start has failed.
    :ivar restarts_in_vain: restarts since the instance last computed a step.
    """

    def __init__(
        self,
        name: str,
        launch: Callable[[], Awaitable[InstanceProcess]],
        listener: "Member[Supervisor]",
        policy: RestartPolicy,
        startup_seconds: float,
        silence_seconds: float,
    ) -> None:
        self.name = name
        self._launch_one = launch
        self._listener = listener
        self._policy = policy
        self._startup_seconds = startup_seconds
        self._silence_seconds = silence_seconds
        self.restarts_in_vain = 0
        self._process: InstanceProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._watchdog = Watchdog(silence_seconds)
        self.settled = asyncio.Event()
        self._drain: Drain | None = None
        self._is_abandoned = self._is_cut = False
        self._launched_at: float | None = None
        self.state: InstanceState = "starting"
        self.restarts = 0

    @property
    def answers(self) -> bool:
        return self.state == "serving" and not self._is_cut and not self._watchdog.is_quiet

    @property
    def starting_seconds(self) -> float:
        """Age of the process that is being started; 0: there is none."""
        if self._launched_at is None:
            return 0.0
        return asyncio.get_running_loop().time() - self._launched_at

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._is_up else None

    @property
    def host(self) -> str:
        """The machine of the instance that is up; "" is this machine, or none."""
        return self._process.host if self._process and self._is_up else ""

    @property
    def address(self) -> str:
        """The address where that instance listens for other fronts; "" if it does not."""
        return self._process.address if self._process and self._is_up else ""

    async def start(self) -> None:
        """Start the first incarnation and wait until it is ready.

        :raises InstanceStartError: when it does not become ready.
        """
        process = await self._launch()
        self._task = asyncio.create_task(self._kept(self._supervise(process)))

    def start_soon(self) -> None:
        """Start the first incarnation while others serve; a failure shows in ``state``."""
        self._task = asyncio.create_task(self._kept(self._start_and_supervise()))

    def send(self, command: Command) -> None:
        if self._process is None or not self._is_up:
            raise InstanceDied(f"no instance serves now ({self.state})")
        self._process.line.send(command)

    async def abandon(self) -> None:
        """Hang up and stop supervising; the instance runs on and has another owner."""
        self._is_abandoned = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None:
            self._process.line.hang_up()

    async def retire(self, drain_seconds: float, death: InstanceDeath, epoch: int = 0) -> None:
        """Let the instance finish its requests within the deadline, then end it for good.

        :param epoch: of the manager that orders it; 0: there is none.
        :param death: reported to the listener at the end, for requests that are not finished.
        """
        drains = self.state == "serving"
        self.state = "draining" if drains else "gone"
        if drains and self._process is not None and self._task is not None:
            self._drain = Drain(epoch)
            self._process.line.send(self._drain)
            await asyncio.wait([self._task], timeout=drain_seconds)
        if self._is_abandoned:
            return
        self.state = "gone"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._process is not None:
            await self._process.kill()
        self._listener.instance_lost(death)

    @property
    def _is_up(self) -> bool:
        return self.state in ("serving", "draining")

    async def _kept(self, supervising: Awaitable[None]) -> None:
        try:
            await supervising
        except Exception:
            logger.exception("instance %s cannot be supervised", self.name)
            if self._process is not None:
                await self._process.kill()
            self._listener.instance_lost(InstanceDeath("it could not be supervised", "killed"))
            self._give_up()

    async def _launch(self) -> InstanceProcess:
        """Start a process and wait until it is ready.

        :raises InstanceStartError: when it cannot be started, for any reason, or ends.
        :raises ProtocolError: when it does not speak the protocol.
        """
        self._launched_at = asyncio.get_running_loop().time()
        try:
            process, facts = await self._launch_ready()
        finally:
            self._launched_at = None
        self._process = process
        self._is_cut = False
        self.state = "serving"
        self.settled.set()
        where = f" on {process.host}" if process.host else ""
        logger.info("instance %s is ready (pid %d%s)", self.name, process.pid, where)
        self._listener.instance_ready(facts)
        return process

    async def _launch_ready(self) -> tuple[InstanceProcess, InstanceFacts]:
        try:
            process = await self._launch_one()
        except KvellError:
            raise
        except Exception as error:  # no descriptor, no thread, or an error of a cluster
            raise InstanceStartError(f"it cannot be started ({error!r})") from error
        try:
            return process, await process.wait_ready(self._startup_seconds)
        except BaseException:
            if not self._is_abandoned:
                await process.kill()
            raise

    async def _start_and_supervise(self) -> None:
        try:
            process: InstanceProcess | None = await self._launch()
        except (InstanceStartError, ProtocolError) as error:
            logger.error("instance %s: %s", self.name, error)
            process = None if self._needs_user(error) else await self._relaunch()
        if process is not None:
            await self._supervise(process)

    async def _supervise(self, process: InstanceProcess) -> None:
        following: InstanceProcess | None = process
        while following is not None:
            death = await self._follow(following)
            if self.state in ("draining", "gone"):
                return
            self.state = "restarting"
            logger.error("instance %s: %s; restarting", self.name, death.problem)
            self._listener.instance_lost(death)
            following = await self._relaunch()

    async def _follow(self, process: InstanceProcess) -> InstanceDeath:
        """Pass events on until the instance ends, also over further connections.

        The process has ended when this returns, so the next owner of its requests is alone.
        """
        while True:
            death = await self._follow_line(process)
            if death is not None:
                return death
            look_seconds = self._silence_seconds / TICKS
            facts = await process.reconnect(TICKS, look_seconds, self._startup_seconds)
            if facts is None:
                return death_of(await process.end())
            self._is_cut = False
            logger.info("instance %s kept running: it is connected again", self.name)
            if self._drain is not None:
                process.line.send(self._drain)  # the first one may have been lost
            self._listener.instance_ready(facts)

    async def _follow_line(self, process: InstanceProcess) -> InstanceDeath | None:
        """Pass events on until the connection ends; return None if it was cut, cause unknown."""
        self._watchdog = Watchdog(self._silence_seconds)
        try:
            ending = await self._watchdog.follow(process.line, self._on_event, process.kill)
        finally:
            self._is_cut = True
        if isinstance(ending, ProtocolError):
            await process.kill()
            return InstanceDeath(f"the instance broke the protocol: {ending}", "protocol")
        if not ending:
            return None
        await process.end()
        silence = f"nothing for {self._silence_seconds:g} s"
        return InstanceDeath(f"the instance sent {silence} and was killed", "hung")

    def _on_event(self, event: Event) -> None:
        self._watchdog.beat()
        # Tokens for other fronts do not arrive here, but heartbeats after a step do.
        if isinstance(event, Tokens) or (isinstance(event, Heartbeat) and event.load.step):
            self.restarts_in_vain = 0
        self._listener.instance_said(event)

    async def _relaunch(self) -> InstanceProcess | None:
        self.settled.set()
        while True:
            self._note_restart()
            await asyncio.sleep(self._policy.pause_seconds(self.restarts_in_vain))
            self.restarts += 1
            self.restarts_in_vain += 1
            try:
                return await self._launch()
            except KvellError as error:
                logger.error(
                    "restart %d of instance %s failed: %s", self.restarts, self.name, error
                )
                if self._needs_user(error):
                    return None

    def _note_restart(self) -> None:
        if self.restarts_in_vain < self._policy.attempts:
            self.state = "restarting"
            return
        if self.state != "failing":
            longest = self._policy.longest_seconds
            logger.error("instance %s keeps failing: restarting it every %g s", self.name, longest)
        self.state = "failing"
        self._listener.instance_given_up()

    def _needs_user(self, error: KvellError) -> bool:
        needs = isinstance(error, InstanceStartError) and error.exit_code == USER_MUST_CHANGE
        if needs:
            self._give_up()
        return needs

    def _give_up(self) -> None:
        self.state = "failed"
        self.settled.set()
        logger.error("instance %s cannot be started; giving up", self.name)
        self._listener.instance_given_up()
