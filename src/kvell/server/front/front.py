"""The front: gives each request its own output, whatever happens to the instance."""

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.codec import ProtocolError
from kvell.engine.protocol.messages import AskStats, Event, Finished, Ready, Stats, Submit, Tokens
from kvell.engine.protocol.sampling_params import MAX_SEED, SamplingParams
from kvell.errors import InstanceDied, TryLater
from kvell.server.front.admission_queue import AdmissionQueue
from kvell.server.front.mailbox import Output
from kvell.server.front.place import Place
from kvell.server.front.request_log import LogEntry, RequestObserver
from kvell.server.instance.death import InstanceDeath
from kvell.server.instance.restart import RestartPolicy
from kvell.server.instance.supervisor import FrontState, Supervisor
from kvell.vocabulary import RequestId


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
    restart: RestartPolicy = field(default_factory=RestartPolicy)


class Front:
    """``async with Front(command) as front: async for output in front.generate(…)``.

    :param command: the instance's command line; arguments ``{socket_fd}`` (needed) and
        ``{incarnation}`` (optional) are filled in at each start.
    :param observer: is told of each request's times.
    :param place: is taken while an instance serves, and given back while one is started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        limits: FrontLimits | None = None,
        observer: RequestObserver | None = None,
        clock: Clock | None = None,
        place: Place | None = None,
    ) -> None:
        self._limits = limits or FrontLimits()
        self._place = place
        self._clock = clock or MonotonicClock()
        self._admission_queue = AdmissionQueue(self._limits.max_waiting, observer)
        self._supervisor = Supervisor(
            command, self, self._limits.restart, self._limits.startup_seconds
        )
        self._ready: Ready | None = None
        self._stats_waiter: asyncio.Future[Stats] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    @property
    def state(self) -> FrontState:
        """The supervisor's state; only ``serving`` is healthy."""
        return self._supervisor.state

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
        return self._admission_queue.waiting

    @property
    def in_flight(self) -> int:
        """Requests the instance holds."""
        return self._admission_queue.in_flight

    @property
    def restarts(self) -> int:
        """How often an instance was started again."""
        return self._supervisor.restarts

    @property
    def instance_pid(self) -> int | None:
        """Process id of the instance; None while there is none."""
        return self._supervisor.pid

    async def start(self) -> None:
        """Start the instance and wait until it is ready.

        :raises InstanceStartError: when it does not become ready.
        """
        await self._supervisor.start()

    async def close(self) -> None:
        """Refuse what waits, let what runs end within the deadline, end the instance."""
        self._admission_queue.fail_waiting("the server is shutting down", self._now())
        await self._supervisor.close(self._limits.drain_seconds)

    async def generate(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
        model: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Serve a prompt (int32 ``[tokens]``); the last output carries ``finished``.

        Closing the generator early cancels the request.

        :param model: which of several; the instance's first if it is not named.
        :raises TryLater: when the waiting line is full.
        :raises InstanceDied: when no instance serves just now.
        """
        entry = self._admit(prompt, sampling, request_id, cache_salt, model)
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
        waiter = self._stats_waiter
        if waiter is None:
            self._supervisor.send(AskStats())
            waiter = self._stats_waiter = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([waiter], timeout=deadline_seconds)
        if not done:
            raise TryLater(f"the instance gave no statistics within {deadline_seconds:g} s")
        return waiter.result()

    def instance_ready(self, ready: Ready) -> None:
        """Serve with the credits of a new incarnation."""
        self._ready = ready
        self._admission_queue.open(ready.credits)
        if self._place is not None:
            self._place.take()
        self._pump()

    def instance_said(self, event: Event) -> None:
        """Route an event to whom it concerns."""
        if isinstance(event, Tokens):
            self._admission_queue.tokens(event, self._now())
        elif isinstance(event, Finished):
            self._admission_queue.finished(event, self._now())
            self._pump()
        elif isinstance(event, Stats) and self._stats_waiter is not None:
            self._stats_waiter.set_result(event)
            self._stats_waiter = None

    def instance_lost(self, death: InstanceDeath) -> None:
        """Keep its requests for the next incarnation, which goes on behind what was emitted."""
        if self._place is not None:
            self._place.give_back()
        self._admission_queue.lost(death, self._now())
        if self._stats_waiter is not None:
            self._stats_waiter.set_exception(InstanceDied(death.problem))
            self._stats_waiter.exception()  # read once: perhaps nobody waits any more
            self._stats_waiter = None

    def instance_given_up(self) -> None:
        """Nothing that waits can be served."""
        self._admission_queue.fail_waiting("the instance cannot be restarted", self._now())

    def _now(self) -> float:
        return self._clock.now_seconds()

    def _admit(
        self,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        request_id: str | None,
        cache_salt: str,
        model: str = "",
    ) -> LogEntry:
        if self.state != "serving":
            raise InstanceDied(f"no instance serves just now ({self.state})")
        if sampling.seed is None:
            # Drawn here and logged, so that a second attempt would draw the same tokens.
            sampling = replace(sampling, seed=secrets.randbelow(MAX_SEED))
        name = RequestId(request_id or uuid.uuid4().hex)
        ids = np.ascontiguousarray(prompt, dtype="<i4").tobytes()
        entry = LogEntry(name, ids, sampling, cache_salt, self._now(), model=model)
        self._admission_queue.add(entry)
        self._pump()
        return entry

    def _drop(self, request_id: RequestId, end_as: Literal["cancelled", "stop"]) -> None:
        cancel = self._admission_queue.drop(request_id, end_as, self._now())
        if cancel is not None and self.state == "serving":
            self._supervisor.send(cancel)

    def _pump(self) -> None:
        if self.state != "serving":
            return
        for submission in self._admission_queue.due(self._now()):
            self._submit(submission)

    def _submit(self, submission: Submit) -> None:
        try:
            self._supervisor.send(submission)
        except ProtocolError as error:
            name, attempt = submission.request_id, submission.attempt
            refusal = Finished(name, attempt, "refused", message=str(error))
            self._admission_queue.finished(refusal, self._now())
