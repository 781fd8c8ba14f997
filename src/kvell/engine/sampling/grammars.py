"""Grammars of answers: the allowed next tokens, by llguidance.

llguidance runs in separate processes (:mod:`.grammar_process`), since a few characters can make it
work for seconds and take gigabytes: there the system limits its time and memory.
::

    check ──► checks' worker ──► verdict, cached by the grammar's text
    masks ──► masks' workers ──► allowed tokens, between steps
          └─► quick worker   ──► those after draft tokens, while a step computes

If an answer may reason first, the grammar begins after the reasoning (:mod:`.reasoning`).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.messages import Cancel, Submit
from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.requests.request import Request
from kvell.engine.sampling.grammar_process.answer_masks import (
    MASK_ROOM_BYTES,
    Allowed,
    AnswerMasks,
    MaskedRequest,
)
from kvell.engine.sampling.grammar_process.checking import (
    CHECK_ROOM_BYTES,
    GOOD,
    TOO_COMPLEX,
    GrammarChecks,
    Verdict,
)
from kvell.engine.sampling.grammar_process.messages import Mask
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses
from kvell.errors import Bound, ChangeSomething, TryLater
from kvell.vocabulary import KIB, MIB, RequestId

PATIENCE_SHARE = 0.1
MOST_PATIENCE_SECONDS = 0.005


class MaskPatience:
    """The time that steps may wait for masks: a share of all time, up to some milliseconds."""

    def __init__(self, now_seconds: float) -> None:
        self._saved = 0.0
        self._then = now_seconds

    def left_seconds(self, now_seconds: float) -> float:
        grown = self._saved + PATIENCE_SHARE * (now_seconds - self._then)
        self._saved = min(grown, MOST_PATIENCE_SECONDS)
        self._then = now_seconds
        return self._saved

    def spend(self, seconds: float) -> None:
        self._saved = max(0.0, self._saved - seconds)


__all__ = ["Allowed", "Grammars", "MaskedRequest", "process_bytes_for"]

TEMPLATE_BYTES = 32 * MIB
TOKEN_BYTES = 7 * KIB // 4
"""Memory of a tokenizer per token: 1.3 KiB, and fragmentation."""


def process_bytes_for(vocab_size: int) -> int:
    return TEMPLATE_BYTES + TOKEN_BYTES * vocab_size + CHECK_ROOM_BYTES + MASK_ROOM_BYTES


class Grammars:
    """The grammars of one model's requests.

    :param tokenizer_json: returns the model's tokenizer as JSON text of the tokenizers library;
        called at the first use.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_token_ids: Iterable[int],
        clock: Clock | None = None,
    ) -> None:
        self._ends = sorted(end_token_ids)
        self.processes = GrammarProcesses(tokenizer_json, self._ends)
        self.checks = GrammarChecks(self.processes)
        self.answers = AnswerMasks(
            self.processes, self.checks, partial(_allowed, vocab_size, self._ends)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-grammars")
        self._clock = clock or MonotonicClock()
        self._patience = MaskPatience(self._clock.now_seconds())

    def known(self, constraint: StructuredOutputs) -> bool:
        """Return whether a grammar is known to be supported; False before its check.

        :raises ChangeSomething: if it is not supported, naming the constraint and its problem.
        """
        if not self._ends:
            why = "needs a token that ends texts, and the model names none"
            raise ChangeSomething(constraint.field_name, "…", why, "leave it out")
        verdict = self.checks.known(constraint)
        return verdict is not None and self.accept(constraint, verdict)

    def accept(self, constraint: StructuredOutputs, verdict: Verdict) -> bool:
        """Return True for the verdict of a supported grammar.

        :raises ChangeSomething: for any other verdict, naming the constraint and its problem.
        """
        if verdict == GOOD:
            return True
        if verdict.violation is not None:
            raise verdict.violation.error()
        if verdict == TOO_COMPLEX:
            raise ChangeSomething(
                constraint.field_name,
                "…",
                f"is too complex: it takes more than 1 s or {CHECK_ROOM_BYTES // MIB} MiB",
                "use shorter repetitions, fewer alternatives, no & or ~ of patterns",
                bound="grammar",
            )
        bound: Bound | None = "grammar" if verdict.is_too_complex else None
        what = "is too complex" if verdict.is_too_complex else "cannot be followed"
        problem = f"{what}: {verdict.problem}"
        raise ChangeSomething(constraint.field_name, "…", problem, "simplify it", bound=bound)

    def check(self, constraint: StructuredOutputs) -> None:
        """Wait for the verdict on a grammar.

        :raises ChangeSomething: if it is not supported, naming the constraint and its problem.
        :raises TryLater: if it cannot be compiled now.
        """
        if not self.known(constraint):
            self.accept(constraint, self.checks.check(constraint).result())

    def masks(self, wanted: Sequence[MaskedRequest]) -> Future[dict[RequestId, Allowed | None]]:
        """Return the allowed next tokens of each request, once all are computed.

        The value is bool [vocabulary], or None if the grammar has become too complex.  A request
        that is reasoning has no entry: any token is allowed.  The masks after draft tokens are
        computed next.
        """
        self.answers.ask(wanted)
        self.answers.ask_drafts(wanted)
        names = [request.request_id for request in wanted]
        if not self.answers.are_ready(names):
            return self._thread.submit(self.answers.wait, names)
        masks: Future[dict[RequestId, Allowed | None]] = Future()
        masks.set_result(self.answers.wait(names))
        return masks

    def draft_masks(
        self, wanted: Sequence[MaskedRequest]
    ) -> dict[RequestId, tuple[Allowed | None, ...]]:
        """Return the allowed tokens after each draft token, for as many as are known in time.

        The value of one is bool [vocabulary]; None if any token may follow.  Waits a part of all
        time at most.
        """
        began_seconds = self._clock.now_seconds()
        names = [request.request_id for request in wanted if request.drafts]
        masks = self.answers.draft_masks(names, self._patience.left_seconds(began_seconds))
        self._patience.spend(self._clock.now_seconds() - began_seconds)
        return masks

    def close(self) -> None:
        self.checks.close()
        self.answers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.processes.close()


def _allowed(vocab_size: int, ends: Sequence[int], mask: Mask, known_tokens: int) -> Allowed | None:
    """Return the allowed tokens of a mask, bool [vocabulary]; None if it allows none.

    :param known_tokens: size of the tokenizer, which the mask has bits for.
    """
    if mask.kind in ("stuck", "free"):
        return None
    allowed = np.zeros(vocab_size, bool)
    if mask.kind == "over":
        allowed[ends] = True
    else:
        size = min(known_tokens, vocab_size)
        bits = np.frombuffer(mask.bits, np.uint8)
        allowed[:size] = np.unpackbits(bits, bitorder="little")[:size]
    if mask.also is not None:
        allowed[mask.also : mask.also + 1] = True  # a model may lack it
    return allowed


class AwaitedGrammars:
    """The grammars of an engine's models, and the requests that wait for a grammar.

    ::

        awaits ── known, or none ─────────────────────────► continues immediately
           └────► waiting ── compiled: the bell rings ────► ended() ──► continues, or is refused
                     └────── cancel ──────────────────────► removed

    The loop never waits for a compilation, and for masks a small part of its time
    (:mod:`.mask_patience`): a request whose mask is late is held, so it has no part in the step.

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
        self.grammars, self._ring = grammars, ring
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

        :raises ChangeSomething: if the grammar is not supported.
        :raises TryLater: if too many grammars are waiting to be compiled.
        """
        grammars = self._of(model, constraint)
        return None if grammars.known(constraint) else grammars.checks.check(constraint)

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
        future = grammars.checks.check(constraint, command.spec.tenant)
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
        self._has_masks = True
        self._ring()

    def _by_model(self) -> list[tuple[str, Grammars]]:
        return [(name, grammars) for name, grammars in self.grammars.items() if grammars]

    def forget(self) -> None:
        self._waiting.clear()
        self._tried.clear()

    def close(self) -> None:
        for grammars in self.grammars.values():
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
        self._tried.append((submit, future))
        self._ring()

    def _of(self, model: str, constraint: StructuredOutputs) -> Grammars:
        grammars = self.grammars.get(model or next(iter(self.grammars), ""))
        if grammars is None:
            why = "needs the model's tokenizer, and it has none"
            raise ChangeSomething("structured_outputs", constraint.kind, why, "leave it out")
        return grammars
