"""Tokens that a plan does not know yet, since the step before draws them: put in when it runs."""

from dataclasses import replace

import numpy as np

from kvell.engine.plan import TO_COME, StepPlan, StepResult, TokenWork


class DrawnBefore:
    """The tokens of one step, for the next; steps run in order."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}

    def filled(self, plan: StepPlan) -> StepPlan:
        """The plan with tokens in the place of ``TO_COME``.

        :raises KeyError: if the step before drew none for a work that waits for one.
        """
        if not any(_waits(work) for work in plan.work):
            return plan
        return replace(plan, work=tuple(self._filled(work) for work in plan.work))

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """A step has run."""
        handles = (work.handle for work in plan.work if work.samples)
        yields = result.by_work()
        self._newest = {h: tokens[-1] for h, tokens in zip(handles, yields, strict=True)}

    def _filled(self, work: TokenWork) -> TokenWork:
        if not _waits(work):
            return work
        known = work.token_ids[:-1]
        return replace(work, token_ids=np.append(known, np.int32(self._newest[work.handle])))


def _waits(work: TokenWork) -> bool:
    return bool(work.token_ids[-1] == TO_COME)
