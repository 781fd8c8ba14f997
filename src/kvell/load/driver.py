"""The open loop: requests are sent on schedule, independently of the server's answers.

::

    Schedule ──due──► ask ──► sent ──pieces──► ended ──► Outcome
       ▲                       │ hangs up, fails, times out ▲
       └── a session's next turn, once the previous answer has ended

Only turns that depend on an answer wait for the server.  Time is the event loop's.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from kvell.errors import ChangeSomething
from kvell.load.answers import AnswerReader
from kvell.load.http.client import HttpClient, served_model
from kvell.load.http.scrape import scrape
from kvell.load.http.wire import ConnectionFailed, RefusedResponse, Wire
from kvell.load.outcome import Outcome
from kvell.load.prompts import Prompts
from kvell.simulator.replay.schedule import Schedule
from kvell.simulator.traces.rows import TraceRow

NO_ANSWER_BEFORE = "the previous turn has no answer"
RETRY_STATUSES = (408, 429)
"""The client errors that do not depend on the request's content."""


@dataclass(frozen=True)
class Load:
    """The requests of a run and their timing.

    :param rows: requests, with arrival times from 0.
    :param hang_ups: draws of :func:`kvell.load.arrivals.hang_ups`, by request.
    :param think_seconds: by request; see :class:`kvell.simulator.replay.schedule.Schedule`.
    """

    rows: Sequence[TraceRow]
    hang_ups: Sequence[int | None]
    think_seconds: Sequence[float] | None = None
    timeout_seconds: float = 600.0


class Driver:
    """The sender of one load.


    :param on_ended: called after each request with the numbers of ended and of all requests.
    """

    def __init__(
        self,
        client: HttpClient,
        wire: Wire,
        prompts: Prompts[Any],
        load: Load,
        on_ended: Callable[[int, int], None] = lambda _ended, _all: None,
    ) -> None:
        self._client, self._wire, self._prompts, self._load = client, wire, prompts, load
        self._on_ended = on_ended
        self._schedule = Schedule(
            load.rows, "trace", lambda _index: True, think_seconds=load.think_seconds
        )
        self._outcomes: list[Outcome] = []
        self._something_ended = asyncio.Event()
        self._started_seconds = 0.0

    async def run(self) -> list[Outcome]:
        """Send all requests; return outcomes in the order of the rows.

        :raises ChangeSomething: if the first request to end was refused for its content.
        """
        self._started_seconds = asyncio.get_running_loop().time()
        refusals: Sequence[Exception] = ()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in self._load.rows:
                    due_seconds, index = await self._next()
                    tasks.create_task(self._request(index, due_seconds))
        except* ChangeSomething as group:
            refusals = group.exceptions
        if refusals:  # not raised above: Python before 3.11.4 wraps what ``except*`` raises
            raise refusals[0]
        return sorted(self._outcomes, key=lambda outcome: outcome.index)

    async def _next(self) -> tuple[float, int]:
        """Wait until a request is due; return its time and its index."""
        loop = asyncio.get_running_loop()
        while True:
            due_seconds = self._schedule.next_seconds()
            if due_seconds is not None and due_seconds <= self._now():
                return due_seconds, self._schedule.pop()
            self._something_ended.clear()
            alarm = None
            if due_seconds is not None:
                at_seconds = self._started_seconds + due_seconds
                alarm = loop.call_at(at_seconds, self._something_ended.set)
            await self._something_ended.wait()
            if alarm is not None:
                alarm.cancel()

    async def _request(self, index: int, due_seconds: float) -> None:
        if self._prompts.can_ask(index):
            outcome = await self._ask(index, due_seconds)
        else:
            now = self._now()
            outcome = Outcome(index, due_seconds, now, now, failure=NO_ANSWER_BEFORE)
        self._outcomes.append(outcome)
        self._schedule.on_ended(index, outcome.ended_seconds)
        self._something_ended.set()
        self._on_ended(len(self._outcomes), len(self._load.rows))

    async def _ask(self, index: int, due_seconds: float) -> Outcome:
        body = self._wire.body(self._prompts.ask(index), self._load.rows[index].output_tokens)
        reader = AnswerReader()
        sent_seconds = self._now()
        failure = await self._failure(index, body, reader)
        hung_up = failure is None and not reader.has_ended
        if failure is None:
            self._prompts.on_answer(index, reader.answer)
        usage = reader.usage
        ended_seconds = self._now()
        details = usage.prompt_tokens_details if usage else None
        return Outcome(
            index,
            due_seconds,
            sent_seconds,
            ended_seconds if failure else reader.last_seconds or ended_seconds,
            tuple(reader.content_seconds),
            usage.prompt_tokens if usage else self._load.rows[index].prompt_tokens,
            reader.output_tokens,
            details.cached_tokens if details else None,
            failure,
            hung_up,
        )

    async def _failure(self, index: int, body: bytes, reader: AnswerReader) -> str | None:
        """Send a request and read its answer; return the reason of a failure, else None."""
        try:
            async with asyncio.timeout(self._load.timeout_seconds):
                left = await self._listen(body, reader, self._load.hang_ups[index])
        except TimeoutError:
            return f"no complete answer within {self._load.timeout_seconds:g} s"
        except ConnectionFailed as error:
            return str(error)
        except RefusedResponse as error:
            return self._refusal(error)
        return None if left else reader.problem()

    async def _listen(self, body: bytes, reader: AnswerReader, pieces: int | None) -> bool:
        """Read the answer; return whether the client disconnected after ``pieces`` pieces."""
        async with aclosing(self._client.stream_of(self._wire.path, body)) as stream:
            async for at_seconds, data in stream:
                reader.feed(at_seconds - self._started_seconds, data)
                has_heard = pieces is not None and len(reader.content_seconds) >= pieces
                if has_heard and not reader.has_ended:
                    return True
        return False

    def _refusal(self, error: RefusedResponse) -> str:
        """Return the failure; raise if the first answer shows that every request would fail."""
        is_wrong = 400 <= error.status < 500 and error.status not in RETRY_STATUSES
        if is_wrong and not self._outcomes:
            raise refused_from_the_start(error, self._wire.model)
        return f"HTTP {error.status}"

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started_seconds


def refused_from_the_start(error: RefusedResponse, model: str) -> ChangeSomething:
    says = f"({error})"
    if error.status in (401, 403):
        return ChangeSomething("--api-key", "…", f"is not accepted {says}", "give the server's key")
    return ChangeSomething(
        "--model",
        model,
        f"the server refuses the first request {says}",
        "change what it names: --endpoint, --prompt-format text, --vocab-size, "
        "--no-ignore-eos, or a workload that the model has room for",
    )


@dataclass(frozen=True)
class LoadResult:
    """The results of a run.

    :param server: figures from the server's own counters; see
        :meth:`kvell.load.http.scrape.Counters.since`.
    """

    model: str
    outcomes: Sequence[Outcome]
    server: dict[str, Any]


async def measure(
    client: HttpClient,
    base_url: str,
    wire: Wire,
    prompts: Prompts[Any],
    load: Load,
    on_ended: Callable[[int, int], None] = lambda _ended, _all: None,
) -> LoadResult:
    """Send a load and return its outcomes.

    :param wire: an empty model is replaced by the server's only one.
    :raises ChangeSomething: if the server does not answer or refuses the requests.
    """
    wire = replace(wire, model=await served_model(client, base_url, wire.model or None))
    before = await scrape(client)
    outcomes = await Driver(client, wire, prompts, load, on_ended).run()
    after = await scrape(client)
    return LoadResult(wire.model, outcomes, after.since(before))
