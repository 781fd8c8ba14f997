"""What fails in a step, and how the requests end whose work that was.

Two things fail.  A row of logits may hold no numbers: then its request ends, with words, and is not
tried again, since it would fail likewise everywhere.  Or a whole step raises an exception: then all
requests whose work it was end *here*, and the front may try each again beside no other suspect.
Pure: no clock, no log.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvell.engine.requests.plan import NO_TOKEN
from kvell.engine.requests.request import Request
from kvell.memory import MemoryCore
from kvell.vocabulary import StepNumber

TOO_COMPLEX = "the answer's grammar has become too complex to follow"
NONE_ALLOWED = (
    "no token may come next: allowed_token_ids, bad_words or the answer's grammar exclude all"
)


class StepFailed(Exception):  # noqa: N818 - it says what happened
    """A step whose copies of pages are all made, and whose tokens were not computed.

    Its ``__cause__`` is the exception that the computation raised.
    """


class StepFailure(Struct, frozen=True, gc=False):
    """Stands in the journal for the result of a step that failed.

    :param problem: what happened, for the requests' ends.
    """

    step: StepNumber
    problem: str


def end_without_token(request: Request, mark: int) -> None:
    """End a request for which a step has no next token.

    :param mark: in the token's place: NO_TOKEN, or NOT_NUMBERS.
    """
    request.finish_reason = "error"
    if mark == NO_TOKEN:
        request.problem = NONE_ALLOWED if request.sampling.is_bounded else TOO_COMPLEX
        return
    request.is_spoiled = True
    request.problem = (
        "the model's logits are not numbers (NaN or infinite) at output position "
        f"{len(request.output)}: its weights, or what it makes of this prompt, are broken"
    )


def end_without_vector(request: Request) -> None:
    """End a request whose prompt has a vector that is no numbers."""
    request.finish_reason, request.is_spoiled = "error", True
    request.problem = (
        "the prompt's vector is not numbers (NaN or infinite): the model's weights, or what it "
        "makes of this prompt, are broken"
    )


def end_without_scores(request: Request) -> None:
    """End a request whose prompt cannot be scored, since logits are no numbers."""
    request.finish_reason, request.is_spoiled = "error", True
    request.problem = (
        "the model's logits are not numbers (NaN or infinite) in the prompt: its weights, or what "
        "it makes of this prompt, are broken"
    )


def end_failed(requests: Sequence[Request], failure: StepFailure) -> None:
    """End the requests of a failed step, which may each be tried again.

    Where some came under suspicion, these alone are blamed.  Those that have ended before keep
    their reason.
    """
    has_suspect = any(request.is_suspect for request in requests)
    for request in requests:
        request.is_spoiled = True
        if request.finish_reason is None:
            is_blamed = request.is_suspect or not has_suspect
            request.step_failed = "suspect" if is_blamed else "blameless"
            request.finish_reason, request.problem = "error", failure.problem


def forget_text(memory: MemoryCore, request: Request) -> None:
    """Evict what a closed request has left in the prefix index, unless others have it too.

    Which of its tokens are spoiled is unknown.  Pages before the first of them hold numbers,
    whoever shares them: kernels leave out what a row may not read.
    """
    tokens = request.tokens(0, request.settled)
    if not len(tokens):
        return
    known = memory.known(tokens, request.cache_root, model=request.model)
    for length in sorted(set(np.unique(known[:, 3]).tolist()), reverse=True):
        if memory.delete(tokens[:length], request.cache_root, model=request.model):
            return
