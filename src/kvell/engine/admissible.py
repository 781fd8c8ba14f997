"""Which prompts can be served at all: asked at the edge and by the engine alike."""

import numpy as np
import numpy.typing as npt

from kvell.engine.limits import Limits
from kvell.errors import ChangeSomething


def prompt_problem(prompt: npt.NDArray[np.int32], limits: Limits) -> ChangeSomething | None:
    """What the user must change about a prompt (int32 [n]); None if it can be served."""
    if not len(prompt):
        return ChangeSomething("prompt", "''", "has no tokens", "give at least one")
    if len(prompt) >= limits.max_model_len:
        return ChangeSomething(
            "prompt",
            f"{len(prompt)} tokens",
            f"leaves no room for output in --max-model-len {limits.max_model_len}",
            f"shorten it to {limits.max_model_len - 1} tokens or raise --max-model-len",
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= limits.vocab_size:
        return ChangeSomething(
            "prompt",
            f"[… {low if low < 0 else high} …]",
            "holds an id that is not a token of this model",
            f"use ids from 0 to {limits.vocab_size - 1}",
        )
    return None
