"""Requests whose grammar is being compiled: they wait here, before the engine core knows them.

::

    awaits ── known, or none ────────────────────────► goes on at once
       └────► waiting ── tried, and the bell rings ──► ended() ──► goes on, or is refused
                 └────── cancel ─────────────────────► gone

The loop never waits for a grammar, and the core's journal never depends on when one was compiled.
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
    """The grammars of an engine's models, and the requests that wait for theirs.

    :param grammars: by model, the first one first; None where answers can follow none.
    :param ring: is called from another thread when :meth:`ended` has something.
    """

    def __init__(self, grammars: Mapping[str, Grammars | None], ring: Callable[[], None]) -> None:
        self._grammars, self._ring = grammars, ring
        self._waiting: dict[RequestId, tuple[Submit, Future[Verdict]]] = {}
        self._tried: deque[tuple[Submit, Future[Verdict]]] = deque()

    @property
    def count(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._waiting)

    def check(self, asked: StructuredOutputs | None, model: str) -> None:
        """Wait until it is known whether a grammar can be followed.

        :param model: "" is the first.
        :raises ChangeSomething: if it cannot be followed.
        :raises TryLater: if that cannot be found out now.
        """
        if asked is not None:
            self._of(model, asked).check(asked)

    def begin_check(self, asked: StructuredOutputs, model: str) -> Future[Verdict] | None:
        """Begin to compile a grammar; None if :meth:`check` has its verdict already.

        :param model: "" is the first.
        :raises ChangeSomething: if it cannot be followed.
        :raises TryLater: if too many grammars wait to be compiled.
        """
        grammars = self._of(model, asked)
        return None if grammars.known(asked) else grammars.tried(asked)

    def awaits(self, command: Submit) -> bool:
        """Whether a request must wait for its grammar; then :meth:`ended` has it later.

        :raises ChangeSomething: if its grammar cannot be followed.
        :raises TryLater: if too many grammars wait to be compiled.
        """
        asked = command.sampling.structured_outputs
        if self._waiting:  # a later attempt takes the place of an earlier one
            self._waiting.pop(command.request_id, None)
        if asked is None:
            return False
        grammars = self._of(command.model, asked)
        if grammars.known(asked):
            return False
        future = grammars.tried(asked, command.tenant)
        self._waiting[command.request_id] = command, future
        future.add_done_callback(partial(self._note, command))
        return True

    def cancel(self, command: Cancel) -> Submit | None:
        """The request that waits no longer, if it did."""
        submit, _ = self._waiting.get(command.request_id, (None, None))
        if submit is None or command.spares(submit.attempt):
            return None
        del self._waiting[command.request_id]
        return submit

    def ended(self) -> Iterator[tuple[Submit, ChangeSomething | TryLater | None]]:
        """Requests whose grammar has been compiled since the last call, and why to refuse them."""
        while self._tried:
            submit, future = self._tried.popleft()
            waiting, _ = self._waiting.get(submit.request_id, (None, None))
            if waiting is submit:  # it was neither cancelled nor asked for anew
                del self._waiting[submit.request_id]
                yield submit, self._problem(submit, future)

    def forget(self) -> None:
        """Let no request wait any longer; nothing is reported of them."""
        self._waiting.clear()
        self._tried.clear()

    def close(self) -> None:
        """End the processes that compile."""
        for grammars in self._grammars.values():
            if grammars is not None:
                grammars.close()

    def _problem(
        self, submit: Submit, future: Future[Verdict]
    ) -> ChangeSomething | TryLater | None:
        asked = submit.sampling.structured_outputs
        assert asked is not None
        try:
            self._of(submit.model, asked).agreed(asked, future.result())
        except (ChangeSomething, TryLater) as problem:
            return problem
        return None

    def _note(self, submit: Submit, future: Future[Verdict]) -> None:
        """On the thread that compiles."""
        self._tried.append((submit, future))
        self._ring()

    def _of(self, model: str, asked: StructuredOutputs) -> Grammars:
        grammars = self._grammars.get(model or next(iter(self._grammars), ""))
        if grammars is None:
            why = "needs the model's tokenizer, and it has none"
            raise ChangeSomething("structured_outputs", asked.kind, why, "leave it out")
        return grammars
