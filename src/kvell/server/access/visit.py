"""One HTTP request as the door sees it: whose it is, what it reserved, what it used."""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvell.clock import Clock
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.requests.equal_parts import EqualParts
from kvell.front.request_log import RequestTrace
from kvell.server.access.accounts import Account
from kvell.server.access.tenants import engine_salt
from kvell.server.text.text_stream import TextDelta

CLIENT_GONE_STATUS = 499


@dataclass(frozen=True)
class Sequences:
    """How many answers or vectors one request asks for.

    :param field: of the request that says how many; for errors.
    :param most_at_once: that are with the front together.
    :param priority: of all of them.
    """

    count: int = 1
    field: str = "prompt"
    most_at_once: int = 1 << 31
    priority: int = 0


ONE = Sequences()


@dataclass(frozen=True)
class EndedVisit:
    """A request that is answered, or whose client left (status 499).

    :param answer_id: of the answer; "" if none was begun, and then there are no tokens either.
    :param request_id: of ``x-request-id``, in the request or else drawn.
    :param seconds: from its head to the last byte of its answer.
    """

    method: str
    path: str
    tenant: str
    status: int
    seconds: float
    answer_id: str = ""
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    request_id: str = ""


class VisitObserver(Protocol):
    """Someone who wants to know who came (logs)."""

    def refused(self, method: str, path: str, client: str, status: int, tenant: str) -> None:
        """A key was missing or wrong (401), or may not do this (403)."""
        ...

    def ended(self, visit: EndedVisit) -> None:
        """A request that was let in is over."""
        ...


class VisitTrace(Protocol):
    """Someone who follows this one visit (tracing)."""

    def asked(self, model: str, sampling: SamplingParams) -> None:
        """It wants answers of a model; the parameters are those of its first prompt."""
        ...

    def answer(self, index: int) -> RequestTrace:
        """Whom the front tells of one of the answers."""
        ...

    def ended(self, visit: EndedVisit, route: str) -> None:
        """It is over; ``route`` is the path as the API writes it, "" if there is none."""
        ...


class VisitTracer(Protocol):
    """Someone who wants to follow visits."""

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], now_seconds: float
    ) -> VisitTrace | None:
        """A visit was let in; None if it is of no interest."""
        ...


class Visit:
    """What the handlers know of who asks.

    :param tenant: "" on a server without keys.
    :param account: of the key; None without one.
    :param trace: follows this visit; None where nobody does.
    :param request_id: as a proxy or the client names it; "" if they do not.
    """

    def __init__(
        self,
        method: str,
        path: str,
        tenant: str,
        account: Account | None,
        clock: Clock,
        trace: VisitTrace | None = None,
        request_id: str = "",
    ) -> None:
        self._method, self._path = method, path
        self._account, self._clock = account, clock
        self._came_seconds = clock.now_seconds()
        self._reserved_tokens = self._in_flight = 0
        self._answer_id, self._model, self._prompt_tokens = "", "", 0
        self._output_tokens, self._cached_tokens = 0, 0
        self._kept: list[tuple[EqualParts, int]] = []
        self.tenant, self.trace = tenant, trace
        self.request_id = request_id or f"req-{uuid.uuid4().hex}"

    def salt(self, client_salt: str | None) -> str:
        """The cache salt for the engine."""
        return engine_salt(self.tenant, client_salt or "")

    def begin(
        self,
        answer_id: str,
        model: str,
        prompt_tokens: int,
        output_tokens: int,
        sequences: Sequences = ONE,
    ) -> None:
        """Reserve the tokens of an answer, at most ``output_tokens`` of output, and its sequences.

        Called before the first sequence is submitted.

        :raises ChangeSomething: when it wants more than the key may ever have.
        :raises RateExceeded: when the key has used up its requests or tokens for now.
        :raises TryLater: when the key has too many sequences in flight.
        """
        if self._account is not None:
            now_seconds = self._clock.now_seconds()
            self._account.check_priority(sequences.priority)
            self._account.reserve(prompt_tokens, output_tokens, now_seconds)
            self._reserved_tokens = prompt_tokens + output_tokens
            at_once = min(sequences.count, sequences.most_at_once)
            self._account.enter(sequences.field, sequences.count, at_once, now_seconds)
            self._in_flight = at_once
        self._answer_id, self._model = answer_id, model
        self._prompt_tokens = prompt_tokens

    def keep(self, pool: EqualParts, size_bytes: int) -> None:
        """Count bytes that are kept for its answer, until it has ended.

        :raises TryLater: if there are too many already.
        """
        pool.take(self.tenant, size_bytes)
        self._kept.append((pool, size_bytes))

    def count(self, delta: TextDelta) -> None:
        """A piece of output came; the last of a sequence says that it has ended."""
        if delta.finish_reason is not None:
            self._leave(1)
        self.count_tokens(len(delta.token_ids))
        self._cached_tokens += delta.usage.cached_tokens

    def count_tokens(self, tokens: int) -> None:
        """Output tokens were made, whether or not they come to be a part of an answer."""
        self._output_tokens += tokens

    def headers(self) -> dict[str, str]:
        """What the answer's head says of the request, and of its key's limits."""
        told = {"x-request-id": self.request_id}
        if self._account is not None:
            told |= self._account.headers(self._clock.now_seconds())
        return told

    def end(self, status: int) -> EndedVisit:
        """Give back what was reserved and not used; called once, however the request ended."""
        self._leave(self._in_flight)
        for pool, size_bytes in self._kept:
            pool.give_back(self.tenant, size_bytes)
        self._kept.clear()
        is_refused = status >= 400 and status != CLIENT_GONE_STATUS
        if is_refused and not self._output_tokens:  # nothing was computed
            self._prompt_tokens = 0
        unused = self._reserved_tokens - self._prompt_tokens - self._output_tokens
        now = self._clock.now_seconds()
        if self._account is not None and unused > 0:
            self._account.give_back(unused, now)
        return EndedVisit(
            *(self._method, self._path, self.tenant, status, now - self._came_seconds),
            *(self._answer_id, self._model),
            *(self._prompt_tokens, self._output_tokens, self._cached_tokens),
            request_id=self.request_id,
        )

    def _leave(self, sequences: int) -> None:
        if self._account is not None and self._in_flight:
            self._in_flight -= sequences
            self._account.leave(sequences)
