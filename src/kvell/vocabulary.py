"""Identifiers and units that all packages share: one noun for one thing."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""A request's name as the front gave it; unique within an instance's life."""

StepNumber = NewType("StepNumber", int)
"""Number of a step; the only time that deciding code knows (LRU time)."""

GroupIndex = NewType("GroupIndex", int)
"""Position of a layer group in a :class:`kvell.pages.layout.Layout`."""

Slot = NewType("Slot", int)
"""Position of a logical large page in the KV address range."""

FinishReason = Literal["stop", "length", "cancelled", "refused", "error", "moved"]
"""Why a request ended; ``stop`` and ``length`` are OpenAI's words.  One that ``moved`` goes on at
another instance."""

NOT_NUMBERS = -2
"""Stands for a token, or for where a row is largest, if the logits are NaN or infinite
(``csrc/forward/largest.h``)."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SECTION_TOKENS = 512
"""Tokens, counted from the first of a text, over which attention reduces before it folds sections
in their order: what one loan of KV memory covers."""
