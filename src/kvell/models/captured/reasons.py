"""Why a step is not repeated from a record, but computed operation by operation."""

from enum import StrEnum

RECORDED = "recorded"
"""Stands for no reason, in counts of steps."""


class Reason(StrEnum):
    """The first of these that holds."""

    PREFILL = "prefill"
    """A request computes more than one token."""
    DRAFTS = "drafts"
    IMAGES = "images"
    HIDDEN = "hidden"
    """The vector of a text is wanted, which no record keeps."""
    LONG_ROPE = "long_rope"
    DROPPING = "dropping"
    CHECKPOINTS = "checkpoints"
    """States are saved on the way."""
    REMOTE = "remote"
    """Creditors compute a part of its attention."""
    SEAMS = "seams"
    """Copies or transfers follow its layers."""
    FAILED = "failed"
    """The device could not record the model's steps."""
    TOO_LARGE = "too_large"
    """It has more rows, pages or sections than the memory of slots holds."""
