"""One HTTP request on the server: its tenant, its reserved tokens and its use."""

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
    """The number of answers or vectors that one request asks for.

    :param field: the request's field that sets the number; for errors.
    :param most_at_once: sequences that are in flight together.
    :param priority: the priority of all sequences.
    """

    count: int = 1
    field: str = "prompt"
    most_at_once: int = 1 << 31
    priority: int = 0


ONE = Sequences()


@dataclass(frozen=True)
class EndedVisit:
    """A request that is answered, or whose client closed the connection (status 499).

    :param answer_id: "" if no answer was begun; then all counts of tokens are 0.
    :param request_id: the request's ``x-request-id``, or else a random one.
    :param seconds: time from the request's head to the last byte of its answer.
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
    """An observer of refused and ended requests (logs)."""

    def on_refused(self, method: str, path: str, client: str, status: int, tenant: str) -> None:
        """Record a request whose key is missing or wrong (401), or has no permission (403)."""
        ...

    def on_ended(self, visit: EndedVisit) -> None:
        """Record the end of an admitted request."""
        ...


class VisitTrace(Protocol):
    """An observer of one request (tracing)."""

    def on_parsed(self, model: str, sampling: SamplingParams) -> None:
        """Record the model and the sampling parameters of the request's first prompt."""
        ...

    def answer(self, index: int) -> RequestTrace:
        """Return the front's observer of answer ``index``."""
        ...

    def on_ended(self, visit: EndedVisit, route: str) -> None:
        """Record the request's end; ``route`` is the API's path template, "" if none matches."""
        ...


class VisitTracer(Protocol):
    """A source of traces of requests."""

    def begin(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], now_seconds: float
    ) -> VisitTrace | None:
        """Return the trace of a request that was admitted; None if the request is not traced."""
        ...


class RequestContext:
    """The state of one admitted request, for its handlers.

    :param tenant: "" on a server without keys.
    :param account: the key's account; None without a key.
    :param request_id: the ``x-request-id`` of a proxy or the client; "" draws a random one.
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
        """Return the cache salt for the engine."""
        return engine_salt(self.tenant, client_salt or "")

    def begin(
        self,
        answer_id: str,
        model: str,
        prompt_tokens: int,
        output_tokens: int,
        sequences: Sequences = ONE,
    ) -> None:
        """Reserve the answer's tokens and sequences, before the first sequence is submitted.

        :param output_tokens: the largest number of output tokens.
        :raises ChangeSomething: when the request exceeds a limit even of an idle key.
        :raises RateExceeded: when the key has too few requests or tokens left now.
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
        """Reserve bytes of a pool until the request ends.

        :raises TryLater: if too many bytes are reserved already.
        """
        pool.take(self.tenant, size_bytes)
        self._kept.append((pool, size_bytes))

    def count(self, delta: TextDelta) -> None:
        """Count a piece of output; a finish reason ends its sequence."""
        if delta.finish_reason is not None:
            self._leave(1)
        self.count_tokens(len(delta.token_ids))
        self._cached_tokens += delta.usage.cached_tokens

    def count_tokens(self, tokens: int) -> None:
        """Count output tokens, also those that do not become part of an answer."""
        self._output_tokens += tokens

    def headers(self) -> dict[str, str]:
        """Return the answer's headers with the request's id and its key's limits."""
        headers = {"x-request-id": self.request_id}
        if self._account is not None:
            headers |= self._account.headers(self._clock.now_seconds())
        return headers

    def end(self, status: int) -> EndedVisit:
        """Refund what was reserved and not used; called exactly once."""
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
            self._method,
            self._path,
            self.tenant,
            status,
            now - self._came_seconds,
            self._answer_id,
            self._model,
            self._prompt_tokens,
            self._output_tokens,
            self._cached_tokens,
            request_id=self.request_id,
        )

    def _leave(self, sequences: int) -> None:
        if self._account is not None and self._in_flight:
            self._in_flight -= sequences
            self._account.leave(sequences)
