"""Token ids of texts, as the memory core takes them."""

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, int32 [tokens]; ids of image tokens are negative."""


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Return the number of leading tokens that two arrays share."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size
