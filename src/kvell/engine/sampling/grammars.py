"""Grammars that answers must follow: which tokens may come next, by llguidance.

llguidance runs in processes beside the instance (:mod:`.grammar_process`), since a few characters
can make it work for seconds and take gigabytes: there the system bounds its time and its memory.
::

    check ──► checks' worker ──► can it be followed?   remembered by the grammar's text
    masks ──► masks' worker  ──► allowed tokens        beside the step

Where an answer may reason first, the grammar begins behind that (:mod:`.reasoning`).
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import StructuredOutputs
from kvell.engine.sampling.grammar_process.checking import (
    CHECK_ROOM_BYTES,
    GOOD,
    TOO_COMPLEX,
    GrammarChecks,
    Verdict,
)
from kvell.engine.sampling.grammar_process.masking import (
    MASK_ROOM_BYTES,
    FoundMask,
    MaskWorker,
    Wanted,
)
from kvell.engine.sampling.grammar_process.processes import GrammarProcesses
from kvell.errors import Bound, ChangeSomething
from kvell.vocabulary import KIB, MIB

__all__ = ["Allowed", "Grammars", "Wanted", "process_bytes_for"]

Allowed = npt.NDArray[np.bool_]
TEMPLATE_BYTES = 32 * MIB
TOKEN_BYTES = 7 * KIB // 4
"""Of a tokenizer, for each of its tokens: 1.3 KiB, and what is free between them."""


def process_bytes_for(vocab_size: int) -> int:
    """The most that the grammar processes of a model take together, once they run."""
    return TEMPLATE_BYTES + TOKEN_BYTES * vocab_size + CHECK_ROOM_BYTES + MASK_ROOM_BYTES


class Grammars:
    """The grammars of one model's requests; masks are computed beside the step.

    :param tokenizer_json: gives the model's tokenizer as JSON text, in the form of the
        tokenizers library; called at the first use.
    :param vocab_size: of the model's logits.
    :param end_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        vocab_size: int,
        end_token_ids: Iterable[int],
    ) -> None:
        self._vocab_size, self._ends = vocab_size, sorted(end_token_ids)
        self._processes = GrammarProcesses(tokenizer_json, self._ends)
        self._checks = GrammarChecks(self._processes)
        self._masks = MaskWorker(self._processes, self._checks)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-grammars")
        self._begun: set[int] = set()
        self._forgotten: list[int] = []

    def known(self, asked: StructuredOutputs) -> bool:
        """Whether a grammar can be followed; False also if it was not tried yet.

        :raises ChangeSomething: naming the constraint and what is wrong with it.
        """
        if not self._ends:
            why = "needs a token that ends texts, and the model names none"
            raise ChangeSomething(asked.field_name, "…", why, "leave it out")
        verdict = self._checks.known(asked)
        return verdict is not None and self.agreed(asked, verdict)

    def tried(self, asked: StructuredOutputs, tenant: str = "") -> Future[Verdict]:
        """Compile a grammar beside the instance; :meth:`agreed` says what the verdict means.

        :param tenant: whose turn it takes.
        :raises TryLater: if too many wait to be compiled; the future raises it as well, if no
            process can be started.
        """
        return self._checks.tried(asked, tenant)

    def agreed(self, asked: StructuredOutputs, verdict: Verdict) -> bool:
        """True for a grammar that can be followed.

        :raises ChangeSomething: for any other, naming the constraint and what is wrong with it.
        """
        if verdict == GOOD:
            return True
        if verdict == TOO_COMPLEX:
            raise ChangeSomething(
                asked.field_name,
                "…",
                f"is too complex: it takes more than 1 s or {CHECK_ROOM_BYTES // MIB} MiB",
                "use shorter repetitions, fewer alternatives, no & or ~ of patterns",
                bound="grammar",
            )
        bound: Bound | None = "grammar" if verdict.is_too_complex else None
        what = "is too complex" if verdict.is_too_complex else "cannot be followed"
        problem = f"{what}: {verdict.problem}"
        raise ChangeSomething(asked.field_name, "…", problem, "simplify it", bound=bound)

    def check(self, asked: StructuredOutputs) -> None:
        """Wait until it is known whether a grammar can be followed.

        :raises ChangeSomething: naming the constraint and what is wrong with it.
        :raises TryLater: if that cannot be found out now.
        """
        if not self.known(asked):
            self.agreed(asked, self.tried(asked).result())

    def masks(self, wanted: Sequence[Wanted]) -> Future[dict[int, Allowed | None]]:
        """Begin to compute which tokens may come next for each request, by handle.

        The value is bool [vocabulary], or None where the grammar has become too complex.  A request
        that still reasons has none: any token may come next.
        """
        forgotten, self._forgotten = self._forgotten, []
        self._begun.update(one.handle for one in wanted)
        return self._thread.submit(self._found, list(wanted), forgotten)

    def release(self, handles: Iterable[int]) -> None:
        """Forget requests that hold no pages any more."""
        if self._begun:
            ended = self._begun.intersection(handles)
            self._begun -= ended
            self._forgotten += ended

    def close(self) -> None:
        """End the processes; nothing can be asked any more."""
        self._checks.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._processes.close()

    def _found(
        self, wanted: Sequence[Wanted], forgotten: Sequence[int]
    ) -> dict[int, Allowed | None]:
        found = self._masks.masks(wanted, forgotten)
        kept = (one for one in wanted if _binds(found[one.handle]))
        return {one.handle: self._array(found[one.handle]) for one in kept}

    def _array(self, found: FoundMask | None) -> Allowed | None:
        if found is None or found.mask.kind == "stuck":
            return None
        allowed, mask = np.zeros(self._vocab_size, bool), found.mask
        if mask.kind == "over":
            allowed[self._ends] = True
        else:
            size = min(found.known_tokens, self._vocab_size)
            bits = np.frombuffer(mask.bits, np.uint8)
            allowed[:size] = np.unpackbits(bits, bitorder="little")[:size]
        if mask.also is not None:
            allowed[mask.also : mask.also + 1] = True  # a model may lack it
        return allowed


def _binds(found: FoundMask | None) -> bool:
    return found is None or found.mask.kind != "free"
