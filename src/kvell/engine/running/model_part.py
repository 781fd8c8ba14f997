"""One model's part of a step, and the results of several parts as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from kvell.engine.requests.plan import StepPlan, StepResult, TokenWork
from kvell.engine.running.drawn import Pending
from kvell.engine.running.pooled import PooledRows
from kvell.engine.sampling.controls import SampledPart, StepControls
from kvell.engine.sampling.draw import RowSampling
from kvell.models.captured.passes import SlotStep
from kvell.models.paged_model import ForwardBatch


@dataclass(frozen=True)
class ModelPart:
    """One model's part of a step.

    :param pending: rows of tokens that the previous step draws, and the device does not know.
    :param is_ahead: whether the device draws its tokens by itself.
    """

    work: Sequence[TokenWork]
    batch: ForwardBatch | SlotStep
    rows: list[RowSampling]
    pending: Pending
    controls: StepControls | None
    pooled: PooledRows
    is_ahead: bool


def device_tokens(step: SlotStep) -> SampledPart:
    """Wait for a recorded step; return the tokens that the device drew."""
    return SampledPart(step.tokens())


def in_turn(plan: StepPlan, drawn: Mapping[str, list[int]]) -> list[int]:
    """Return the tokens that several models drew, in the order of the plan's work."""
    left = {name: iter(tokens) for name, tokens in drawn.items()}
    return [next(left[work.spec.model]) for work in plan.work for _ in range(work.num_draws)]


def with_extras(result: StepResult, drawn: Mapping[str, SampledPart]) -> StepResult:
    """Return the result with the logprobs and prompt vectors that requests asked for."""
    if not any(part.logprobs or part.scored or part.pooled for part in drawn.values()):
        return result
    logprobs = {handle: value for part in drawn.values() for handle, value in part.logprobs.items()}
    scored = {handle: value for part in drawn.values() for handle, value in part.scored.items()}
    pooled = {handle: value for part in drawn.values() for handle, value in part.pooled.items()}
    return structs.replace(result, logprobs=logprobs, scored=scored, pooled=pooled)


def rows_of(work: Sequence[TokenWork]) -> list[RowSampling]:
    """Return the sampling of each row of the work's logits, in order."""
    return [
        RowSampling.of(item.spec.sampling, item.output_index + index)
        for item in work
        if item.samples
        for index in range(1 + item.proposed)
    ]
