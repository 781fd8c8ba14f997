"""The end of a reasoning budget, which depends only on the answer's tokens.

::

    answer   <think>  a  b  c  d  </think>  …
                      └─ budget ┘ └─ forced, unless one of a … d was the end

So the budget of a request that was preempted or moved ends at the same token.
"""

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import ReasoningBudget


def forced_token(budget: ReasoningBudget, output: npt.NDArray[np.int32]) -> int | None:
    """Return the token that is forced next, or None.

    :param output: the answer's tokens so far, int32.
    """
    if len(output) != budget.end_place(int(output[0]) if len(output) else -1):
        return None
    has_ended = np.isin(output, (budget.end, *budget.calls)).any()
    return None if has_ended else budget.end
