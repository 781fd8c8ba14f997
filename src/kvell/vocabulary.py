"""Identifiers and units that all packages share: one noun for one thing."""

from typing import Literal, NewType

RequestId = NewType("RequestId", str)
"""A request's name, given by the front; unique within an instance's life."""

StepNumber = NewType("StepNumber", int)
"""Number of a step; the only measure of time in code that decides (LRU time)."""

GroupIndex = NewType("GroupIndex", int)
"""Position of a layer group in a :class:`kvell.pages.layout.Layout`."""

PageId = NewType("PageId", int)
"""Number of a page among its group's pages, in the pool or in the CPU buffer."""

Slot = NewType("Slot", int)
"""Position of a logical large page in the KV address range."""

FinishReason = Literal["stop", "length", "cancelled", "refused", "error", "moved"]
"""Why a request ended; ``stop`` and ``length`` are OpenAI's words. A request that ``moved``
continues on another instance."""

NOT_NUMBERS = -2
"""A mark in place of a token, or of the index of a row's largest logit, if the logits are NaN or
infinite (``csrc/forward/largest.h``)."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

SECTION_TOKENS = 512
"""Tokens of one section, counted from the start of a text. Attention reduces within each section
and then folds the sections in order. One loan of KV memory covers one section."""
