"""Requests that wait until their grammar is compiled; the engine core receives them later.

::

    awaits ── known, or none ─────────────────────────► continues immediately
       └────► waiting ── compiled: the bell rings ────► ended() ──► continues, or is refused
                 └────── cancel ──────────────────────► removed

The loop never waits for a grammar, and the core's journal does not depend on the compilation time.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial

from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process.checking import Verdict
from kvell.engine.sampling.grammars import Grammars
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import RequestId


class AwaitedGrammars:
    """The grammars of an engine's models, and the requests that wait for a grammar.

    :param grammars: by model name, the first model first; None if a model supports no grammar.
    :param ring: called from another thread when :meth:`take_compiled` has requests.
    """

    def __init__(self, grammars: Mapping[str, Grammars | None], ring: Callable[[], None]) -> None:
        self._grammars, self._ring = grammars, ring
        self._waiting: dict[RequestId, tuple[Submit, Future[Verdict]]] = {}
        self._tried: deque[tuple[Submit, Future[Verdict]]] = deque()

    @property
    def count(self) -> int:
        """The number of requests that wait for a grammar."""
        return len(self._waiting)

    def check(self, constraint: StructuredOutputs | None, model: str) -> None:
        """Wait for the verdict on a grammar.

        :param model: "" is the first.
        :raises ChangeSomething: if the grammar is not supported.
        :raises TryLater: if it cannot be compiled now.
        """
        if constraint is not None:
            self._of(model, constraint).check(constraint)

    def begin_check(self, constraint: StructuredOutputs, model: str) -> Future[Verdict] | None:
        """Begin to compile a grammar; return None if its verdict is known.

        :param model: "" is the first.
        :raises ChangeSomething: if the grammar is not supported.
        :raises TryLater: if too many grammars are waiting to be compiled.
        """
        grammars = self._of(model, constraint)
        return None if grammars.known(constraint) else grammars.begin_check(constraint)

    def awaits(self, command: Submit) -> bool:
        """Return whether a request waits for its grammar; :meth:`take_compiled` yields it later.

        :raises ChangeSomething: if its grammar is not supported.
        :raises TryLater: if too many grammars are waiting to be compiled.
        """
        constraint = command.spec.sampling.structured_outputs
        if self._waiting:  # a later attempt replaces an earlier one
            self._waiting.pop(command.request_id, None)
        if constraint is None:
            return False
        grammars = self._of(command.spec.model, constraint)
        if grammars.known(constraint):
            return False
        future = grammars.begin_check(constraint, command.spec.tenant)
        self._waiting[command.request_id] = command, future
        future.add_done_callback(partial(self._note, command))
        return True

    def cancel(self, command: Cancel) -> Submit | None:
        """Return the cancelled request, if it was waiting."""
        submit, _ = self._waiting.get(command.request_id, (None, None))
        if submit is None or command.spares(submit.attempt):
            return None
        del self._waiting[command.request_id]
        return submit

    def take_compiled(self) -> Iterator[tuple[Submit, ChangeSomething | TryLater | None]]:
        """Yield requests whose grammar is now compiled, each with the reason to refuse or None."""
        while self._tried:
            submit, future = self._tried.popleft()
            waiting, _ = self._waiting.get(submit.request_id, (None, None))
            if waiting is submit:  # it was neither cancelled nor replaced
                del self._waiting[submit.request_id]
                yield submit, self._problem(submit, future)

    def forget(self) -> None:
        """Drop all waiting requests, without events."""
        self._waiting.clear()
        self._tried.clear()

    def close(self) -> None:
        """End the processes that compile grammars."""
        for grammars in self._grammars.values():
            if grammars is not None:
                grammars.close()

    def _problem(
        self, submit: Submit, future: Future[Verdict]
    ) -> ChangeSomething | TryLater | None:
        constraint = submit.spec.sampling.structured_outputs
        assert constraint is not None
        try:
            self._of(submit.spec.model, constraint).accept(constraint, future.result())
        except (ChangeSomething, TryLater) as problem:
            return problem
        return None

    def _note(self, submit: Submit, future: Future[Verdict]) -> None:
        """Note a compiled grammar; called on the thread that compiles."""
        self._tried.append((submit, future))
        self._ring()

    def _of(self, model: str, constraint: StructuredOutputs) -> Grammars:
        grammars = self._grammars.get(model or next(iter(self._grammars), ""))
        if grammars is None:
            why = "needs the model's tokenizer, and it has none"
            raise ChangeSomething("structured_outputs", constraint.kind, why, "leave it out")
        return grammars
