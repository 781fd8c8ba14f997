"""Grammars of answers: the allowed next tokens, by llguidance.

llguidance runs in separate processes (:mod:`.grammar_process`), since a few characters can make it
work for seconds and take gigabytes: there the system limits its time and memory.
::

    check ──► checks' worker ──► verdict, cached by the grammar's text
    masks ──► masks' workers ──► allowed tokens, between steps
          └─► quick worker   ──► those after draft tokens, while a step computes

If an answer may reason first, the grammar begins after the reasoning (:mod:`.reasoning`).
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from kvell.clock import Clock, MonotonicClock
from kvell.engine.protocol.structured_outputs import StructuredOutputs
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
from kvell.engine.sampling.grammar_process.masking import FoundMask
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses
from kvell.engine.sampling.mask_patience import MaskPatience
from kvell.errors import Bound, ChangeSomething
from kvell.vocabulary import KIB, MIB, RequestId

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
    :param vocab_size: size of the model's logits.
    :param end_token_ids: tokens that end an answer.
    :ivar answers: the masks of running answers.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_token_ids: Iterable[int],
        clock: Clock | None = None,
    ) -> None:
        self._ends = sorted(end_token_ids)
        self._processes = GrammarProcesses(tokenizer_json, self._ends)
        self._checks = GrammarChecks(self._processes)
        self.answers = AnswerMasks(
            self._processes, self._checks, partial(_allowed, vocab_size, self._ends)
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
        verdict = self._checks.known(constraint)
        return verdict is not None and self.accept(constraint, verdict)

    def begin_check(self, constraint: StructuredOutputs, tenant: str = "") -> Future[Verdict]:
        """Begin to compile a grammar; pass the verdict to :meth:`accept`.

        :param tenant: the tenant whose turn it takes.
        :raises TryLater: if too many grammars wait; the future raises it if no process can start.
        """
        return self._checks.check(constraint, tenant)

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
            self.accept(constraint, self.begin_check(constraint).result())

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
        self._checks.close()
        self.answers.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._processes.close()


def _allowed(vocab_size: int, ends: Sequence[int], found_mask: FoundMask) -> Allowed | None:
    """Return the allowed tokens of a mask, bool [vocabulary]; None if it allows none."""
    mask = found_mask.mask
    if mask.kind in ("stuck", "free"):
        return None
    allowed = np.zeros(vocab_size, bool)
    if mask.kind == "over":
        allowed[ends] = True
    else:
        size = min(found_mask.known_tokens, vocab_size)
        bits = np.frombuffer(mask.bits, np.uint8)
        allowed[:size] = np.unpackbits(bits, bitorder="little")[:size]
    if mask.also is not None:
        allowed[mask.also : mask.also + 1] = True  # a model may lack it
    return allowed
