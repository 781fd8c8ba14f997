"""Which steps are repeated from a record on the device, and why others are not."""

from collections.abc import Sequence

from kvell.engine.requests.plan import StepPlan, TokenWork
from kvell.models.captured.reasons import Reason


def why_computed(
    plan: StepPlan, work: Sequence[TokenWork], *, drops: bool, takes_images: bool
) -> Reason | None:
    """Return why a model's part of a step cannot be repeated from a record; None if it can.

    :param drops: whether layers drop prompt tokens.
    """
    if plan.pools:
        return Reason.HIDDEN
    if takes_images:
        return Reason.IMAGES
    if drops:
        return Reason.DROPPING
    if plan.away or plan.borrowed:
        return Reason.REMOTE
    if plan.streams:
        return Reason.SEAMS
    if len(plan.checkpoints):
        return Reason.CHECKPOINTS
    if any(item.proposed for item in work):
        return Reason.DRAFTS
    if any(item.uses_long_rope for item in work):
        return Reason.LONG_ROPE
    if not all(map(_is_decode, work)):
        return Reason.PREFILL
    return None


def _is_decode(work: TokenWork) -> bool:
    """Return whether a request goes on by one token, of which logits are wanted."""
    return work.count == 1 and work.start > 0 and work.samples and work.scores is None
