"""The tokens that one answer or vector uses, however it ends."""

from collections.abc import Callable

from kvell.front.request_log import EndedRequest, RequestTrace


class SequenceUse:
    """The use of one sequence; its requests in the front report to it.

    A prompt counts as computed if an instance began to compute it.  The output of a sequence that
    ended early counts as far as instances made it, also if the client has received less.

    :param prompt: the prompt's index in its HTTP request; several sequences may share it.
    :param on_idle: called whenever no request of the sequence is left in the front.
    :param trace: also notified of the first request.
    :param on_accepted: called when an instance has accepted a request of the sequence.
    """

    def __init__(
        self,
        prompt: int = 0,
        prompt_tokens: int = 0,
        on_idle: Callable[[], None] = lambda: None,
        trace: RequestTrace | None = None,
        on_accepted: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.prompt_tokens = prompt, prompt_tokens
        self._on_idle, self._trace = on_idle, trace
        self.on_accepted = on_accepted
        self._requests = self._running = 0
        self._made_tokens = self._read_tokens = 0
        self._is_read = False
        self.has_begun = False

    @property
    def is_running(self) -> bool:
        return self._running > 0

    @property
    def output_tokens(self) -> int:
        if self._is_read and self._read_tokens:  # without tokens behind a stop string
            return self._read_tokens
        return max(self._read_tokens, self._made_tokens)

    def read(self, tokens: int, *, is_last: bool) -> None:
        """Count tokens that became a part of the answer."""
        self._read_tokens += tokens
        if is_last:
            self._is_read = True

    def on_admitted(self) -> None:
        self._requests += 1
        self._running += 1
        if self._trace is not None and self._requests == 1:
            self._trace.on_admitted()

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
            trace.on_ended(request)
        if not self._running:
            self._on_idle()
