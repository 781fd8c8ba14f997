"""The cut at a prompt's end, and which states may displace cached pages.

A state represents all tokens before it, so a state group can resume only where a state was kept.
The compiled core cuts and keeps states (``csrc/memory/checkpoints.h``;
``tests/oracle/eviction/checkpoints.py`` says why).
"""

from collections.abc import Sequence

from kvell.pages.layout import GroupKind, GroupSpec

CUT_TOKENS = 512
"""The distance of the cuts of a prompt after the first ones; the last of them is its end."""
END_TOKENS = 64
"""The unit of a last cut close to a prompt's end."""
WORTH_TOKENS = 512
"""The number of saved tokens from which a state may always displace older pages."""
WORTH_PART = 4
"""The divisor for other states: one may displace older pages if it saves at least a fourth of the
tokens whose keys and values fill its bytes."""


def prompt_end(prompt_tokens: int, alignment: int) -> int:
    """Return the cut at a prompt's end: its last multiple of 512, or of 64 if it is shorter."""
    unit = CUT_TOKENS if prompt_tokens >= CUT_TOKENS else END_TOKENS
    return prompt_tokens // unit * unit // alignment * alignment


def is_worth_displacing(group: GroupSpec, groups: Sequence[GroupSpec], saved_tokens: int) -> bool:
    """Return whether a state that saves ``saved_tokens`` may displace less recently used pages."""
    state_bytes = group.page_stride_bytes * group.slices
    token_bytes = sum(
        other.page_stride_bytes / other.page_tokens
        for other in groups
        if other.kind is GroupKind.FULL
    )
    return saved_tokens >= WORTH_TOKENS or saved_tokens * token_bytes * WORTH_PART >= state_bytes
