"""The interface of cost models for schedulers and planners.

``exec(x, y)`` of MemServe §5.3, with two additions: the running batch that a prompt's chunks are
mixed with, and the medium of the cached part. f(β) and g(S) of Infinite-LLM's equation 5,
``T(β, S) = W(β)/f(β) + Σ S/g(S)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvell.cost.amounts import ModelShape
from kvell.cost.work import Chunk, Work

Medium = Literal["device", "host"]
"""The memory of a hit's pages."""

CHUNK_TOKENS = 2048
"""Most tokens of a step; the default of engines."""
PROBE_TOKENS = 1024
"""Length over which g(S) is measured."""


class CostModel(Protocol):
    """A predictor of the seconds of steps."""

    def step_seconds(self, work: Sequence[Work]) -> float:
        """Return the seconds of a step in which prompts and decodes may be mixed."""
        ...


@dataclass(frozen=True)
class Fetch:
    """The cost of copying cached pages to the device.

    :param bytes_per_second: from the host's memory to the device's.
    """

    shape: ModelShape
    bytes_per_second: float

    def seconds(self, tokens: int, medium: Medium) -> float:
        """Return the seconds for a hit of ``tokens``; 0 if they are on the device already."""
        if medium == "device" or not tokens:
            return 0.0
        return self.shape.stored_bytes(tokens) / self.bytes_per_second


def prefill_seconds(
    model: CostModel,
    prompt_tokens: int,
    cached_ratio: float,
    *,
    running_tokens: Sequence[int] = (),
    medium: Medium = "device",
    fetch: Fetch | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> float:
    """Return exec(x, y): the time from a prompt's first step to its first token.

    At least the last token of a prompt is always computed.

    :param cached_ratio: y, the part of the prompt that is cached, 0 to 1.
    :param running_tokens: contexts of the requests that decode in the same steps.
    :param fetch: the cost of a hit on the host; needed for ``medium="host"``.
    :raises ValueError: if the ratio is invalid, or a hit on the host has no cost.
    """
    if not 0.0 <= cached_ratio <= 1.0 or prompt_tokens < 1:
        raise ValueError(f"no prompt has {prompt_tokens} tokens, {cached_ratio:.0%} of them cached")
    start = min(int(prompt_tokens * cached_ratio), prompt_tokens - 1)
    seconds = 0.0
    if medium == "host":
        if fetch is None:
            raise ValueError("a hit in the CPU buffer needs a price of copies: give fetch")
        seconds = fetch.seconds(start, medium)
    room = max(1, chunk_tokens - len(running_tokens))
    steps = 0
    while start < prompt_tokens:
        count = min(room, prompt_tokens - start)
        is_last = start + count == prompt_tokens
        decodes = [Chunk(tokens + steps, 1) for tokens in running_tokens]
        seconds += model.step_seconds([*decodes, Chunk(start, count, int(is_last))])
        start, steps = start + count, steps + 1
    return seconds


def decode_seconds(model: CostModel, contexts_tokens: Sequence[int]) -> float:
    return model.step_seconds([Chunk(tokens, 1) for tokens in contexts_tokens])


def batch_seconds(model: CostModel, batch: int) -> float:
    """Return T^natn(β): seconds of a decode step of ``batch`` requests without earlier tokens."""
    return decode_seconds(model, [0] * batch)


def attended_tokens_per_second(model: CostModel, context_tokens: int = PROBE_TOKENS) -> float:
    """Return g(S): tokens of context per second that attention reads, over all layers."""
    longer = decode_seconds(model, [context_tokens + PROBE_TOKENS])
    shorter = decode_seconds(model, [context_tokens])
    return PROBE_TOKENS / max(1e-12, longer - shorter)
