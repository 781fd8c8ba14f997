"""The activation arena: what a step's forward pass may use beside KV cache.

Static today: a fixed reserve, granted to one step at a time.  The interface is
that of the elastic arena to come (eLLM §4): a step asks for the bytes it will
need, gets them together with its KV pages or not at all, and gives them back
with its result.

::

    IDLE ──grant(need ≤ capacity)──► GRANTED ──release──► IDLE
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ActivationModel:
    """Bytes of activations a step needs, linear in its tokens and logit rows."""

    fixed_bytes: int
    token_bytes: int
    logits_row_bytes: int

    def need_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Peak of a step of ``num_tokens`` that asks for ``num_rows`` rows of logits."""
        return self.fixed_bytes + num_tokens * self.token_bytes + num_rows * self.logits_row_bytes


class ActivationArena:
    """Activation memory of one engine: a capacity, and what is granted of it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.granted_bytes = 0
        self.peak_bytes = 0

    def grant(self, need_bytes: int) -> bool:
        """Reserve ``need_bytes`` for a step; False if they are not there now."""
        if self.granted_bytes + need_bytes > self.capacity_bytes:
            return False
        self.granted_bytes += need_bytes
        self.peak_bytes = max(self.peak_bytes, self.granted_bytes)
        return True

    def release(self, need_bytes: int) -> None:
        """Give back what a grant reserved.

        :raises ValueError: on giving back more than is granted.
        """
        if need_bytes > self.granted_bytes:
            raise ValueError(f"{need_bytes} bytes were not granted")
        self.granted_bytes -= need_bytes
