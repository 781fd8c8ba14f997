"""Failures in a step, and the ends of the affected requests.

There are two kinds.  A row of logits may be NaN or infinite: then its request ends with a message
and is not tried again, since it would fail on every instance.  Or a whole step raises an exception:
then all its requests end *here*, and the front may try each again, without other suspects in the
same steps.  Pure: no clock, no log.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from kvell.engine.requests.plan import NO_TOKEN
from kvell.engine.requests.request import Request
from kvell.errors import ChangeSomething
from kvell.memory import MemoryCore
from kvell.pages.rows import SourceRow
from kvell.vocabulary import StepNumber

TOO_COMPLEX = "the answer's grammar has become too complex to follow"
NONE_ALLOWED = (
    "no token may come next: allowed_token_ids, bad_words and the answer's grammar exclude all"
)


class StepFailed(Exception):  # noqa: N818 - it says what happened
    """The failure of a step after all its page copies, before its tokens were computed.

    Its ``__cause__`` is the exception of the computation.
    """


class StepFailure(Struct, frozen=True, gc=False):
    """The result of a failed step, also in the journal."""

    step: StepNumber
    problem: str


def end_without_token(request: Request, mark: int) -> None:
    """End a request for which a step has no next token.

    :param mark: the value in place of the token: NO_TOKEN or NOT_NUMBERS.
    """
    request.finish_reason = "error"
    if mark == NO_TOKEN:
        request.problem = TOO_COMPLEX
        if request.sampling.is_bounded:
            lists = "bad_words", "allowed_token_ids"
            request.problem_field = lists[request.sampling.allowed_token_ids is not None]
            error = ChangeSomething(
                request.problem_field, "…", NONE_ALLOWED, "exclude fewer tokens"
            )
            request.problem = str(error)
        return
    request.is_spoiled = True
    request.problem = (
        "the model's logits are not numbers (NaN or infinite) at output position "
        f"{len(request.output)}: its weights are damaged, or this prompt overflows them"
    )


def end_without_vector(request: Request) -> None:
    request.finish_reason, request.is_spoiled = "error", True
    request.problem = (
        "the prompt's vector is not numbers (NaN or infinite): the model's weights, or what it "
        "makes of this prompt, are broken"
    )


def end_without_scores(request: Request) -> None:
    request.finish_reason, request.is_spoiled = "error", True
    request.problem = (
        "the model's logits are not numbers (NaN or infinite) in the prompt: its weights, or what "
        "it makes of this prompt, are broken"
    )


def end_failed(requests: Sequence[Request], failure: StepFailure) -> None:
    """End the requests of a failed step, each of which may be tried again.

    If some are suspects, only these are blamed.  Requests that ended before keep their reason.
    """
    has_suspect = any(request.is_suspect for request in requests)
    for request in requests:
        request.is_spoiled = True
        if request.finish_reason is None:
            is_blamed = request.is_suspect or not has_suspect
            request.step_failed = "suspect" if is_blamed else "blameless"
            request.finish_reason = "error"
            request.problem = failure.problem


def forget_text(memory: MemoryCore, request: Request) -> None:
    """Evict a closed request's text from the prefix index, unless other requests have it too.

    It is unknown which of its tokens are spoiled.  Shared pages before the first spoiled token are
    correct, since kernels skip what a row may not read.
    """
    tokens = request.tokens(0, request.settled)
    if not len(tokens):
        return
    cached = memory.known(tokens, request.cache_root, model=request.model)
    for length in sorted(set(np.unique(cached[:, SourceRow.END]).tolist()), reverse=True):
        if memory.delete(tokens[:length], request.cache_root, model=request.model):
            return
