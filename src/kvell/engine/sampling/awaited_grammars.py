"""Requests that wait for their grammar: until it is compiled, and before a token until its mask is
computed.

::

    awaits ── known, or none ─────────────────────────► continues immediately
       └────► waiting ── compiled: the bell rings ────► ended() ──► continues, or is refused
                 └────── cancel ──────────────────────► removed

The loop never waits for a compilation, and for masks a small part of its time
(:mod:`.mask_patience`): a request whose mask is late is held, so it has no part in the step.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from functools import partial

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.request import Request
from kvell.engine.sampling.grammar_process.checking import Verdict
from kvell.engine.sampling.grammars import Grammars, MaskedRequest
from kvell.engine.sampling.mask_patience import MaskPatience
from kvell.errors import ChangeSomething, TryLater
from kvell.vocabulary import RequestId


class AwaitedGrammars:
    """The grammars of an engine's models, and the requests that wait for a grammar.

    :param grammars: by model name, the first model first; None if a model supports no grammar.
    :param ring: called from another thread when :meth:`take_compiled` has requests, or the mask of
        a held request is ready.
    """

    def __init__(
        self,
        grammars: Mapping[str, Grammars | None],
        ring: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self._grammars, self._ring = grammars, ring
        self._clock = clock or MonotonicClock()
        self._patience = MaskPatience(self._clock.now_seconds())
        self._has_masks = self._follows = False
        self._waiting: dict[RequestId, tuple[Submit, Future[Verdict]]] = {}
        self._tried: deque[tuple[Submit, Future[Verdict]]] = deque()

    @property
    def count(self) -> int:
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

    def follow(self, requests: Collection[Request]) -> None:
        """Begin to compute the masks that these requests need next; forget those of others."""
        if not (requests or self._follows):
            return
        self._follows = bool(requests)
        for model, grammars in self._by_model():
            grammars.answers.follow(
                MaskedRequest(r.request_id, form, r.output, r.spec.tenant, r.attempt)
                for r in requests
                if r.model == model and (form := r.sampling.structured_outputs) is not None
            )

    def late_requests(self, requests: Collection[Request]) -> frozenset[RequestId]:
        """Return the requests whose masks are late, after a short wait for quick ones."""
        self.follow(requests)
        late = self._late(requests)
        if late:
            began_seconds = self._clock.now_seconds()
            left_seconds = self._patience.left_seconds(began_seconds)
            for _, grammars in self._by_model():
                waited_seconds = self._clock.now_seconds() - began_seconds
                grammars.answers.wait_quick(left_seconds - waited_seconds)
            self._patience.spend(self._clock.now_seconds() - began_seconds)
            late = self._late(requests)
        return late

    def _late(self, requests: Collection[Request]) -> frozenset[RequestId]:
        late = frozenset[RequestId]()
        for model, grammars in self._by_model():
            names = [request.request_id for request in requests if request.model == model]
            late |= grammars.answers.late(names, self._note_mask)
        return late

    def find_undrafted(self, requests: Collection[Request]) -> frozenset[RequestId]:
        """Return the requests whose draft tokens would get no masks, as theirs are slow."""
        undrafted = frozenset[RequestId]()
        for model, grammars in self._by_model():
            names = [request.request_id for request in requests if request.model == model]
            undrafted |= grammars.answers.find_undrafted(names)
        return undrafted

    def take_masked(self) -> bool:
        has_masks, self._has_masks = self._has_masks, False
        return has_masks

    def _note_mask(self) -> None:
        """Note that a late mask is ready; called on the thread that receives it."""
        self._has_masks = True
        self._ring()

    def _by_model(self) -> list[tuple[str, Grammars]]:
        return [(name, grammars) for name, grammars in self._grammars.items() if grammars]

    def forget(self) -> None:
        self._waiting.clear()
        self._tried.clear()

    def close(self) -> None:
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
