"""Policies of layer groups: the tokens that each kind keeps, and the lengths where it can resume.

Source: Jenga §5.1-5.3, fig. 9.  Positions and lengths are in tokens.  A window in the paper counts
only *earlier* tokens, so its 2 is 3 here.
"""

from dataclasses import dataclass, field

from kvell.pages.layout import GroupKind, GroupSpec


@dataclass(frozen=True)
class GroupPolicy:
    """The rules of one layer group; pure functions of token counts.

    This one is full attention: every earlier token is read, so a hit needs all of them.

    :param required_for_hit: False if the group is refilled rather than resumed (drafters, consumed
        embeddings).
    """

    required_for_hit: bool = field(default=True, kw_only=True)

    def active_start(self, num_tokens: int) -> int:
        """Return the first token that a later step may still read after ``num_tokens``."""
        return 0

    def kept_start(self, num_tokens: int) -> int:
        """Return the first token that stays active: the last step read it, or a later one may.

        Pages that end before this token lose their user; their last access is now.
        """
        return 0

    def live_tokens(self, num_tokens: int) -> int:
        """Return the tokens that a request of ``num_tokens`` keeps between steps."""
        return num_tokens - self.active_start(num_tokens)

    def most_kept_tokens(self, num_tokens: int) -> int:
        """Return the peak of active tokens between steps up to ``num_tokens``."""
        return num_tokens


@dataclass(frozen=True)
class SlidingPolicy(GroupPolicy):
    """Sliding window: the next token reads the last ``window_tokens - 1``."""

    window_tokens: int

    def active_start(self, num_tokens: int) -> int:
        """Return where the window of the next token starts; the next token is its last."""
        return max(0, num_tokens - (self.window_tokens - 1))

    def kept_start(self, num_tokens: int) -> int:
        """Return where the window of the last computed token starts: one token earlier."""
        return max(0, num_tokens - self.window_tokens)

    def most_kept_tokens(self, num_tokens: int) -> int:
        return min(num_tokens, self.window_tokens)


@dataclass(frozen=True)
class ChunkedPolicy(GroupPolicy):
    """Chunked-local attention (Llama 4): a token reads only its own chunk.

    Chunks start at multiples of ``chunk_tokens``.  When a chunk ends, all of it is released: the
    next token starts the next chunk.
    """

    chunk_tokens: int

    def active_start(self, num_tokens: int) -> int:
        """Return where the chunk of the next token starts."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens

    kept_start = active_start

    def most_kept_tokens(self, num_tokens: int) -> int:
        return min(num_tokens, self.chunk_tokens - 1)


@dataclass(frozen=True)
class StatePolicy(GroupPolicy):
    """Recurrent state: it represents all tokens before it, so only a kept state can resume.

    A state is not made of tokens: no token is released, and the group's unit is one state.
    """

    def live_tokens(self, num_tokens: int) -> int:
        return min(1, num_tokens)

    most_kept_tokens = live_tokens


@dataclass(frozen=True)
class DroppingPolicy(GroupPolicy):
    """Full attention over ``budget_tokens`` of a long prompt (PyramidKV).

    Only prompts within the budget put pages into the index, and they never drop tokens.
    """

    budget_tokens: int


def policy_of(group: GroupSpec) -> GroupPolicy:
    """Return the policy of a group's kind; positions of image groups count image tokens."""
    required = group.required_for_hit
    match group.kind:
        case GroupKind.SLIDING:
            return SlidingPolicy(group.window_tokens, required_for_hit=required)
        case GroupKind.CHUNKED:
            return ChunkedPolicy(group.window_tokens, required_for_hit=required)
        case GroupKind.STATE:
            return StatePolicy(required_for_hit=required)
        case GroupKind.DROPPING:
            return DroppingPolicy(group.window_tokens, required_for_hit=required)
        case GroupKind.FULL | GroupKind.CROSS:
            return GroupPolicy(required_for_hit=required)
        case GroupKind.VISION:
            return GroupPolicy(required_for_hit=False)
