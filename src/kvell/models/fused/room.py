"""The memory of a compiled step, with its results."""

from dataclasses import dataclass

import torch

from kvell.models.fused.need import FLOAT_BYTES, StepParts, align


@dataclass(frozen=True)
class Room:
    """Memory of a step with a given number of tokens and of logits rows."""

    tokens: int
    rows: int
    parts: StepParts
    memory: torch.Tensor
    address: int
    logits: torch.Tensor

    def hidden(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the head's input: the final norm's output of each logits row, [rows, size].

        It is stored after the stream, where every norm writes (``csrc/forward/workspace.cpp``), and
        lasts only until the next step.
        """
        start = self.parts.attention_bytes + align(FLOAT_BYTES * size * self.tokens)
        numbers = self.memory[start : start + self.rows * size * dtype.itemsize]
        return numbers.view(dtype).view(self.rows, size)
