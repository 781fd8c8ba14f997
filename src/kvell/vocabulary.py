"""The words that all rooms share: identifiers and units, one noun for one thing."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""A request's name as the front gave it; unique within an instance's life."""

StepNumber = NewType("StepNumber", int)
"""Number of a step; the engine's only notion of time when it decides (LRU time)."""

GroupIndex = NewType("GroupIndex", int)
"""Position of a layer group in a :class:`kvell.pages.layout.Layout`."""

LogicalLargePage = NewType("LogicalLargePage", int)
"""A large page as tables name it; it keeps its name when its bytes move."""

Slot = NewType("Slot", int)
"""Where a logical large page lies: its position in the KV address range."""

FinishReason = Literal["stop", "length", "cancelled", "refused", "error"]
"""Why a request ended; ``stop`` and ``length`` are OpenAI's words."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
