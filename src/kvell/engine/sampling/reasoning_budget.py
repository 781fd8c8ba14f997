"""Where a budget of reasoning is used up; the answer's tokens alone say so.

::

    answer   <think>  a  b  c  d  </think>  …
                      └─ budget ┘ └─ forced, unless one of a … d was the end

So a request that was preempted, or goes on at another instance, is bound at the same token.
"""

import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.structured_outputs import ReasoningBudget


def forced_token(budget: ReasoningBudget, output: npt.NDArray[np.int32]) -> int | None:
    """The token that must come next; None if any may.

    :param output: the answer's tokens so far, int32.
    """
    begin = 0 if budget.start is None else 1
    if len(output) != begin + budget.tokens:
        return None
    if begin and output[0] != budget.start:
        return None
    return None if (output == budget.end).any() else budget.end
