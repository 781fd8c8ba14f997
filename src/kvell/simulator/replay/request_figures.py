"""The figures of one request of a trace."""

from dataclasses import dataclass


@dataclass
class RequestFigures:
    """One request's life, in steps and virtual seconds; None for events that did not happen.

    ``prompt_tokens`` include those that stand for images. ``came_seconds`` is when the client sent
    it, the other times are when the first and the last token of its answer reached the client.
    Steps are those of the instance that first admitted it, and of those that sent these tokens.
    """

    index: int
    prompt_tokens: int
    hit_tokens: int | None = None
    admitted_step: int | None = None
    first_token_step: int | None = None
    finish_step: int | None = None
    came_seconds: float | None = None
    first_token_seconds: float | None = None
    finish_seconds: float | None = None
