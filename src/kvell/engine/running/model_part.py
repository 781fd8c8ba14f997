"""One model's part of a step, and the results of several parts as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from msgspec import structs

from kvell.engine.requests.plan import PENDING, StepPlan, StepResult, TokenWork
from kvell.engine.sampling.controls import SampledPart, StepControls
from kvell.engine.sampling.draw import RowSampling
from kvell.models.captured.passes import SlotStep
from kvell.models.paged_model import ForwardBatch
from kvell.vocabulary import StepNumber

LEAST_LENGTH = 1e-12
"""The shortest vector that is normalised: the direction of a shorter one would be noise."""


@dataclass(frozen=True)
class HandleRows:
    """Some rows of a step, of its logits or its tokens, and their handles."""

    rows: tuple[int, ...] = ()
    handles: tuple[int, ...] = ()

    def vectors(self, hidden: torch.Tensor) -> dict[int, bytes]:
        """Return vectors of length 1 by handle, as little-endian float32 bytes.

        A vector with NaN or infinite numbers is empty.

        :param hidden: the head's input of all rows of logits, float32 [n, size].
        """
        chosen = hidden[list(self.rows)].float().cpu()
        ones = torch.nn.functional.normalize(chosen, dim=-1, eps=LEAST_LENGTH).numpy()
        made = (
            vector.astype("<f4").tobytes() if np.isfinite(vector).all() else b"" for vector in ones
        )
        return dict(zip(self.handles, made, strict=True))


NO_ROWS = HandleRows()


def pooled_rows(work: Sequence[TokenWork]) -> HandleRows:
    """Find the rows of logits that give a vector."""
    rows, end = list[tuple[int, int]](), 0
    for item in work:
        end += item.num_logits
        if item.pools:
            rows.append((end - 1, item.handle))
    return HandleRows(tuple(row for row, _ in rows), tuple(handle for _, handle in rows))


def pending(work: Sequence[TokenWork]) -> HandleRows:
    """Find the work whose last token the previous step draws; no other token can be pending."""
    if all(item.token_ids.item(-1) != PENDING for item in work):
        return NO_ROWS
    ends = accumulate(item.count for item in work)
    waiting = [
        (end - 1, item.handle)
        for end, item in zip(ends, work, strict=True)
        if item.token_ids.item(-1) == PENDING
    ]
    return HandleRows(tuple(row for row, _ in waiting), tuple(handle for _, handle in waiting))


class DrawnBefore:
    """The tokens that one step has drawn, for the next step.

    Steps run in order, but the result of one may be taken after that of the next.
    """

    def __init__(self) -> None:
        self._last: tuple[StepPlan, StepResult] | None = None
        self._has_failed = False
        self._step = StepNumber(0)

    def note(self, plan: StepPlan, result: StepResult) -> None:
        if self._is_newest(plan.step):
            self._last = (plan, result)
            self._has_failed = False

    def fail(self, step: StepNumber) -> None:
        """Note that a step has failed; the next step's results from its tokens are discarded."""
        if self._is_newest(step):
            self._has_failed = True

    def _is_newest(self, step: StepNumber) -> bool:
        self._step = max(self._step, step)
        return step == self._step

    def newest(self, handles: Sequence[int]) -> list[int]:
        """Return the last token that the previous step drew for each handle.

        Without a valid token any will do: the request has ended, or its step has failed.

        :raises KeyError: if none was drawn for a handle.
        """
        if self._has_failed:
            return [0] * len(handles)
        drawn = self._drawn() if handles else {}
        return [max(0, drawn[handle]) for handle in handles]

    def _drawn(self) -> dict[int, int]:
        if self._last is None:
            return {}
        plan, result = self._last
        drawing = (work.handle for work in plan.work if work.samples)
        yields = result.by_work()
        return {handle: tokens[-1] for handle, tokens in zip(drawing, yields, strict=True)}


@dataclass(frozen=True)
class ModelPart:
    """One model's part of a step.

    :param pending: rows of tokens that the previous step draws, and the device does not know.
    :param is_ahead: whether the device draws its tokens by itself.
    """

    work: Sequence[TokenWork]
    batch: ForwardBatch | SlotStep
    rows: list[RowSampling]
    pending: HandleRows
    controls: StepControls | None
    pooled: HandleRows
    is_ahead: bool


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
