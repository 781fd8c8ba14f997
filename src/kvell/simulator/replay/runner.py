"""Stand-ins for a model and its device: tokens come from the trace, seconds from a profile."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from msgspec import structs

from kvell.cost.analytic import DeviceProfile, ModelCost
from kvell.cost.calibration import Calibration
from kvell.engine.requests.plan import StepPlan, StepResult, TokenWork, verify
from kvell.simulator.traces.drawing import keyed_fraction
from kvell.simulator.traces.prompts import PromptMaker

WRONG = -2
"""A draft token that never equals a trace's token."""


class StepTimer(Protocol):
    """Timer of plans."""

    @property
    def request_seconds(self) -> float:
        """Extra seconds that a request waits, before its first step and after its first token."""
        ...

    def step_seconds(self, plan: StepPlan) -> float: ...


@dataclass(frozen=True)
class CalibratedMachine:
    """Timer of steps as ``kvell calibrate`` measured them, serving included."""

    calibration: Calibration

    @property
    def request_seconds(self) -> float:
        return self.calibration.serving.request_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        return self.calibration.served_step_seconds(plan.work)


@dataclass(frozen=True)
class Machine:
    """Timer of steps from a device, the model on it, and its draft model."""

    profile: DeviceProfile
    cost: ModelCost
    draft: ModelCost | None = None
    request_seconds: float = 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        seconds = self.profile.step_seconds(self.cost.of_step(plan.work))
        if self.draft is None:
            return seconds
        passes = (self.draft.of_step(work) for work in draft_passes(plan))
        return seconds + sum(self.profile.step_seconds(cost) for cost in passes)


def draft_passes(plan: StepPlan) -> list[list[TokenWork]]:
    """Return the draft model's work by pass: the known tokens, then one draft token per request."""
    most = max((work.proposed for work in plan.work), default=0)
    first_pass = [structs.replace(work, count=work.known, proposed=0) for work in plan.work]
    return [
        first_pass,
        *(
            [
                structs.replace(work, start=work.start + work.known + index, count=1, proposed=0)
                for work in plan.work
                if work.proposed > index
            ]
            for index in range(most)
        ),
    ]


@dataclass(frozen=True)
class Acceptance:
    """Choice of the draft tokens that are right, without a model to make them.

    :param rate: chance that a draft token is right if those before it are, 0 to 1; drawn from seed,
        request and output position alone.
    """

    rate: float = 0.0
    seed: int = 0

    def is_right(self, request: int, position: int) -> bool:
        return keyed_fraction(self.seed, request, position) < self.rate


class TraceRunner:
    """Runner that answers plans with the trace's output tokens, like ``engine/running/runner``."""

    def __init__(self, prompts: PromptMaker, acceptance: Acceptance | None = None) -> None:
        self._prompts = prompts
        self._acceptance = acceptance or Acceptance()

    def run(self, plan: StepPlan) -> StepResult:
        """Return a token for each work that samples, and more where draft tokens are accepted."""
        tokens = [
            self._prompts.output_token(int(work.request_id), work.output_index + index)
            for work in plan.work
            for index in range(work.num_logits)
        ]
        if any(work.proposed for work in plan.work):
            works = tuple(self._drafted(work) if work.proposed else work for work in plan.work)
            plan = replace(plan, work=works)
        return verify(plan, tokens)

    def _drafted(self, work: TokenWork) -> TokenWork:
        """Return the work with draft tokens, right or wrong as ``Acceptance`` decides."""
        request = int(work.request_id)
        first = work.output_index
        draft_tokens = [
            self._prompts.output_token(request, position)
            if self._acceptance.is_right(request, position)
            else WRONG
            for position in range(first, first + work.proposed)
        ]
        tokens = np.concatenate([work.token_ids[: work.known], np.asarray(draft_tokens, np.int32)])
        return structs.replace(work, token_ids=tokens)
