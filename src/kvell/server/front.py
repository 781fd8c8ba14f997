"""The front: keeps an instance process alive and gives each request its own output.

::

    starting ──Ready──► serving ──instance ends──► restarting ──Ready──► serving
        │                  │                            └─ attempts used up ──► failed
        └─ not ready ──► (raises)                 close(), from any ──► closing
"""

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvell.clock import Clock, MonotonicClock
from kvell.engine.codec import ProtocolError
from kvell.engine.protocol import AskStats, Drain, Event, Finished, Ready, Stats, Submit, Tokens
from kvell.engine.sampling_params import MAX_SEED, SamplingParams
from kvell.errors import InstanceDied, TryLater
from kvell.server.desk import Desk
from kvell.server.instance_process import InstanceProcess, InstanceStartError
from kvell.server.mailbox import Output
from kvell.server.request_log import LogEntry, RequestObserver
from kvell.server.restart import RestartPolicy
from kvell.vocabulary import RequestId

logger = logging.getLogger(__name__)

FrontState = Literal["starting", "serving", "restarting", "failed", "closing"]


@dataclass(frozen=True)
class FrontLimits:
    """Bounds of a front.

    :param max_waiting: requests that may wait for a credit before new ones are refused.
    :param startup_seconds: an instance must be ready within this time.
    :param drain_seconds: running requests may end within this time when closing.
    """

    max_waiting: int = 1024
    startup_seconds: float = 600.0
    drain_seconds: float = 30.0
    restart: RestartPolicy = RestartPolicy()


class Front:
    """``async with Front(command) as front: async for output in front.generate(…)``.

    :param command: the instance's command line; arguments ``{socket_fd}`` (needed) and
        ``{incarnation}`` (optional) are filled in at each start.
    :param observer: is told of each request's times.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: FrontLimits | None = None,
        observer: RequestObserver | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._command = tuple(command)
        self._limits = limits or FrontLimits()
        self._clock = clock or MonotonicClock()
        self._desk = Desk(self._limits.max_waiting, observer)
        self._state: FrontState = "starting"
        self._restarts: Counter[str] = Counter()
        self._stats_waiter: asyncio.Future[Stats] | None = None
        self._process: InstanceProcess | None = None
        self._ready: Ready | None = None
        self._supervisor: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def state(self) -> FrontState:
        """Where the front is in the machine above."""
        return self._state

    @property
    def ready(self) -> Ready:
        """What the latest ready incarnation said of itself.

        :raises InstanceDied: before the first was ready.
        """
        if self._ready is None:
            raise InstanceDied("no instance was ready yet")
        return self._ready

    @property
    def waiting(self) -> int:
        """Requests that wait for a credit."""
        return self._desk.waiting

    @property
    def in_flight(self) -> int:
        """Requests the instance holds."""
        return self._desk.in_flight

    @property
    def restarts(self) -> int:
        """How often an instance was started again."""
        return self._restarts["all"]

    @property
    def instance_pid(self) -> int | None:
        """Process id of the instance; None while there is none."""
        return self._process.pid if self._process and self._state == "serving" else None

    async def start(self) -> None:
        """Start the instance and wait until it is ready.

        :raises InstanceStartError: when it does not become ready.
        """
        events = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(events))

    async def close(self) -> None:
        """Refuse what waits, let what runs end within the deadline, end the instance."""
        self._state = "closing"
        self._desk.fail_waiting("the server is shutting down", self._now())
        if self._supervisor is None or self._process is None:
            return
        self._process.send(Drain())
        await asyncio.wait([self._supervisor], timeout=self._limits.drain_seconds)
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        await self._process.kill()
        self._lose_instance("the server is shutting down")

    async def generate(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Serve a prompt (int32 ``[tokens]``); the last output carries ``finished``.

        Closing the generator early cancels the request.

        :raises TryLater: when the waiting line is full.
        :raises InstanceDied: when no instance serves just now.
        """
        entry = self._admit(prompt, sampling, request_id, cache_salt)
        ended = False
        try:
            while not ended:
                output = await entry.mailbox.take()
                ended = output.finished is not None
                yield output
        finally:
            if not ended:
                self._drop(entry.request_id, "cancelled")

    def stop(self, request_id: str) -> None:
        """End a request on purpose; its last output says ``stop``."""
        self._drop(RequestId(request_id), "stop")

    async def stats(self, deadline_seconds: float = 5.0) -> Stats:
        """Ask the instance for its counters; callers at the same time share one answer.

        :raises InstanceDied: when no instance serves just now.
        :raises TryLater: when it does not answer in time.
        """
        process = self._serving_process()
        waiter = self._stats_waiter
        if waiter is None:
            waiter = self._stats_waiter = asyncio.get_running_loop().create_future()
            process.send(AskStats())
        done, _ = await asyncio.wait([waiter], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance gave no statistics within {deadline_seconds:g} s")
        return waiter.result()

    def _now(self) -> float:
        return self._clock.now_seconds()

    def _serving_process(self) -> InstanceProcess:
        if self._process is None or self._state != "serving":
            raise InstanceDied(f"no instance serves just now ({self._state})")
        return self._process

    def _admit(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        request_id: str | None,
        cache_salt: str,
    ) -> LogEntry:
        self._serving_process()
        if sampling.seed is None:
            # Drawn here and logged, so that a second attempt draws the same tokens.
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        name = RequestId(request_id or uuid.uuid4().hex)
        ids = np.ascontiguousarray(prompt, dtype="<i4").tobytes()
        entry = LogEntry(name, ids, sampling, cache_salt, self._now())
        self._desk.add(entry)
        self._pump()
        return entry

    def _drop(self, request_id: RequestId, end_as: Literal["cancelled", "stop"]) -> None:
        cancel = self._desk.drop(request_id, end_as, self._now())
        if cancel is not None and self._process is not None:
            self._process.send(cancel)

    def _pump(self) -> None:
        for submission in self._desk.due():
            self._send_submission(submission)

    def _send_submission(self, submission: Submit) -> None:
        try:
            self._serving_process().send(submission)
        except ProtocolError as error:
            refusal = Finished(
                submission.request_id, submission.attempt, "refused", message=str(error)
            )
            self._desk.finished(refusal, self._now())

    async def _launch(self) -> AsyncIterator[Event]:
        incarnation = self._restarts["all"]
        process = await InstanceProcess.launch(self._command, incarnation)
        events = process.events()
        try:
            self._ready = await process.wait_ready(events, self._limits.startup_seconds)
        except BaseException:
            await process.kill()
            raise
        self._process = process
        if self._state != "closing":
            self._state = "serving"
            self._desk.open(self._ready.credits)
            self._pump()
        logger.info("instance %d ready (pid %d)", incarnation, process.pid)
        return events

    async def _supervise(self, events: AsyncIterator[Event]) -> None:
        while True:
            problem = await self._follow(events)
            if self._state == "closing":
                return
            self._state = "restarting"
            failed = self._lose_instance(problem)
            logger.error("%s; %d requests failed; restarting", problem, failed)
            relaunched = await self._relaunch()
            if relaunched is None:
                return
            events = relaunched

    async def _follow(self, events: AsyncIterator[Event]) -> str:
        """Deliver events until the instance ends; says how it ended."""
        assert self._process is not None
        try:
            async for event in events:
                self._deliver(event)
        except ProtocolError as error:
            await self._process.kill()
            return f"the instance broke the protocol: {error}"
        code = await self._process.end()
        return f"the instance process ended unexpectedly (exit {code})"

    def _deliver(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._restarts["fruitless"] = 0
            self._desk.tokens(event, self._now())
        elif isinstance(event, Finished):
            self._desk.finished(event, self._now())
            if self._state == "serving":
                self._pump()
        elif isinstance(event, Stats) and self._stats_waiter is not None:
            self._stats_waiter.set_result(event)
            self._stats_waiter = None

    def _lose_instance(self, problem: str) -> int:
        if self._stats_waiter is not None:
            self._stats_waiter.set_exception(InstanceDied(problem))
            self._stats_waiter.exception()  # nobody may be waiting any more
            self._stats_waiter = None
        return self._desk.fail_in_flight(problem, self._now())

    async def _relaunch(self) -> AsyncIterator[Event] | None:
        while True:
            pause = self._limits.restart.pause_seconds(self._restarts["fruitless"])
            if pause is None:
                self._state = "failed"
                self._desk.fail_waiting("the instance cannot be restarted", self._now())
                logger.error("the instance cannot be restarted; giving up")
                return None
            await asyncio.sleep(pause)
            self._restarts.update(("all", "fruitless"))
            try:
                return await self._launch()
            except (InstanceStartError, ProtocolError) as error:
                logger.error("%s", error)
