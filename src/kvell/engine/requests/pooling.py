"""Checks of prompts that ask for a vector, in the front and in the engine.

Only the vector of the last token is served.  A mean over all tokens needs every token's hidden
state, but a cached prefix has only keys and values: it would have to be recomputed.
"""

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.pooling import Pooling
from kvell.engine.requests.admissible import prompt_problem
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething

LAST: Pooling = "last"


def served_pooling(pooling: str) -> Pooling:
    """Return the pooling that a user asked for.

    :raises ChangeSomething: if it is not served.
    """
    if pooling != LAST:
        problem = "is not served: a cached prefix keeps only keys and values"
        raise ChangeSomething("pooling", str(pooling)[:40], problem, f"use {LAST}")
    return LAST


def pooling_problem(
    prompt: npt.NDArray[np.int32], limits: Limits, *, has_images: bool
) -> ChangeSomething | None:
    """Return what the user must change about a prompt (int32 [n]); None if it can have a vector.

    The prompt may be as long as a request, since no output follows.
    """
    if has_images:
        problem = "cannot be part of an embedded prompt"
        return ChangeSomething("images", "…", problem, "leave them out, or generate instead")
    return prompt_problem(prompt, limits, output_tokens=0)
