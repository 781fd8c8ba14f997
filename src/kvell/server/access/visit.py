"""One HTTP request on the server: its tenant, its reserved tokens and its use."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvell.clock import Clock
from kvell.engine.requests.turns import EqualParts
from kvell.front.request_log import EndedRequest
from kvell.server.access.accounts import Account
from kvell.server.access.traced_visit import EndedVisit, TracedVisit
from kvell.server.text.text_stream import TextDelta


class SequenceUse:
    """The use of one sequence; its requests in the front report to it.

    A prompt counts as computed if an instance began to compute it.  The output of a sequence that
    ended early counts as far as instances made it, also if the client has received less.

    :param prompt: the prompt's index in its HTTP request; several sequences may share it.
    :param on_idle: called whenever no request of the sequence is left in the front; None: no call.
    :param trace: the trace of its HTTP request, also notified of the first request.
    :param index: the sequence's index in that trace.
    :param on_accepted: called when an instance has accepted a request of the sequence.
    :ivar read_tokens: the tokens that became a part of the answer so far.
    """

    def __init__(
        self,
        prompt: int = 0,
        prompt_tokens: int = 0,
        on_idle: Callable[[], None] | None = None,
        trace: TracedVisit | None = None,
        on_accepted: Callable[[], None] = lambda: None,
        index: int = 0,
    ) -> None:
        self.prompt, self.prompt_tokens = prompt, prompt_tokens
        self._on_idle, self._trace, self._index = on_idle, trace, index
        self.on_accepted = on_accepted
        self._requests = self._running = 0
        self._made_tokens = self.read_tokens = 0
        self.is_read = False
        self.has_begun = False

    @property
    def is_running(self) -> bool:
        return self._running > 0

    @property
    def output_tokens(self) -> int:
        if self.is_read and self.read_tokens:  # without tokens behind a stop string
            return self.read_tokens
        return max(self.read_tokens, self._made_tokens)

    def on_admitted(self) -> None:
        self._requests += 1
        self._running += 1
        if self._trace is not None and self._requests == 1:
            self._trace.awaited += 1

    def on_ended(self, request: EndedRequest) -> None:
        """Count what a request has computed."""
        finished = request.finished
        self._running -= 1
        self._made_tokens += request.output_tokens
        self.has_begun = (
            self.has_begun
            or finished.reason in ("stop", "length")
            or request.output_tokens > 0
            or finished.prefill_seconds > 0
        )
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.on_answered(self._index, request)
        if self._on_idle is not None and not self._running:
            self._on_idle()


def engine_salt(tenant: str, client_salt: str) -> str:
    """Return the engine's cache salt, which is unique for each tenant and client salt.

    The length of the tenant's name precedes the name, so a client's salt cannot imitate another
    tenant.  On a server without keys there is no tenant and the client's salt is returned.
    """
    return f"{len(tenant)}:{tenant}{client_salt}" if tenant else client_salt


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


class RequestContext:
    """The state of one admitted request, for its handlers.

    :param tenant: "" on a server without keys.
    :param account: the key's account; None without a key.
    :param request_id: the ``x-request-id`` of a proxy or the client; "" draws a random one.
    :ivar uses: the use of each sequence, by its index.
    """

    def __init__(
        self,
        method: str,
        path: str,
        tenant: str,
        account: Account | None,
        clock: Clock,
        trace: TracedVisit | None = None,
        request_id: str = "",
    ) -> None:
        self._account, self._clock = account, clock
        self._came_seconds = clock.now_seconds()
        self._reserved_tokens = self._in_flight = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._status = 0
        self.uses: dict[int, SequenceUse] = {}
        self._kept: list[tuple[EqualParts, int]] = []
        self.is_accepted = False
        self._when_accepted: Callable[[], object] = lambda: None
        self.tenant, self.trace = tenant, trace
        self.request_id = request_id or f"req-{uuid.uuid4().hex}"
        self._visit = EndedVisit(method, path, tenant, 0, 0.0, request_id=self.request_id)

    def salt(self, client_salt: str | None) -> str:
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
        self._visit = replace(self._visit, answer_id=answer_id, model=model)
        self._prompt_tokens = prompt_tokens

    def keep(self, pool: EqualParts, size_bytes: int) -> None:
        """Reserve bytes of a pool until the request ends.

        :raises TryLater: if too many bytes are reserved already.
        """
        pool.take(self.tenant, size_bytes)
        self._kept.append((pool, size_bytes))

    def when_accepted(self, call: Callable[[], object]) -> None:
        """Call a function when an instance has accepted the first of the answer's requests.

        ``is_accepted`` says whether one has.
        """
        self._when_accepted = call
        if self.is_accepted:
            call()

    def _note_accepted(self) -> None:
        self.is_accepted = True
        self._when_accepted()

    def sequence(self, index: int, prompt: int = 0, prompt_tokens: int = 0) -> SequenceUse:
        """Return the use of a new sequence, which its requests in the front report to.

        :param prompt: index of its prompt; a prompt is charged once for all its sequences.
        """
        on_idle = None if self._account is None else self._on_idle
        accepted = self._note_accepted
        use = SequenceUse(prompt, prompt_tokens, on_idle, self.trace, accepted, index)
        self.uses[index] = use
        return use

    def count(self, delta: TextDelta, index: int = 0) -> None:
        """Count a piece of a sequence's output; a finish reason ends the sequence."""
        use = self.uses.get(index)
        if use is None:
            use = self.uses[index] = SequenceUse()
        use.read_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            use.is_read = True
            if self._account is not None:
                self._leave(self._account, 1)
        self._cached_tokens += delta.usage.cached_tokens

    def headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.request_id}
        if self._account is not None:
            headers |= self._account.headers(self._clock.now_seconds())
        return headers

    def end(self, status: int) -> EndedVisit:
        """End the visit, and refund what was reserved and not used; called exactly once."""
        if self._account is not None:
            self._leave(self._account, self._in_flight)
        for pool, size_bytes in self._kept:
            pool.give_back(self.tenant, size_bytes)
        self._kept.clear()
        self._status = status
        prompt_tokens, output_tokens = self._used_tokens()
        if self._account is not None:
            self._on_idle()
        return replace(
            self._visit,
            status=status,
            seconds=self._clock.now_seconds() - self._came_seconds,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _on_idle(self) -> None:
        """Refund unused tokens after the visit's end, once the front has none of its requests.

        What a request that was cancelled at the end has computed is known only then.
        """
        if self._account is None or not self._status:
            return
        if any(use.is_running for use in self.uses.values()):
            return
        unused = self._reserved_tokens - sum(self._used_tokens())
        self._reserved_tokens = 0
        if unused > 0:
            self._account.give_back(unused, self._clock.now_seconds())

    def _used_tokens(self) -> tuple[int, int]:
        """Return the tokens of computed prompts and of output.

        A prompt that may be computing at the moment counts.
        """
        uses = self.uses.values()
        output_tokens = sum(use.output_tokens for use in uses)
        followed = [use for use in uses if use.prompt_tokens]
        is_refused = self._status >= 400
        if not followed:
            is_refused = is_refused and self._status != CLIENT_GONE_STATUS and not output_tokens
        if not is_refused:
            return self._prompt_tokens, output_tokens
        begun = (use for use in followed if use.has_begun or use.is_running)
        return sum({use.prompt: use.prompt_tokens for use in begun}.values()), output_tokens

    def _leave(self, account: Account, sequences: int) -> None:
        if self._in_flight:
            self._in_flight -= sequences
            account.leave(sequences)


WATCHED = frozenset({"/livez", "/readyz", "/health", "/ping", "/metrics"})
"""Probes and scrapes; a busy server answers them, too."""
READ_OFTEN = WATCHED | {"/", "/cluster", "/load", "/version"}
BELOW = "/debug/"
READS = ("GET", "HEAD")


def is_monitoring(method: str, path: str) -> bool:
    reads = method in READS and (path in READ_OFTEN or path.startswith(BELOW))
    return reads or path in WATCHED  # SageMaker's probe is a POST
