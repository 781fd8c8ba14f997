"""What each kind of layer group asks of the cache: one interface for every kind.

Source: Jenga §5.1-5.3, fig. 9.  Positions and lengths are in tokens; the paper
counts *earlier* tokens as its window, so its 2 is our 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvell.pages.layout import GroupKind, GroupSpec


class GroupPolicy(Protocol):
    """The rules of one layer group; pure functions of token counts."""

    @property
    def required_for_hit(self) -> bool:
        """False for what is refilled rather than resumed (drafters, consumed embeddings)."""
        ...

    def active_start(self, num_tokens: int) -> int:
        """First token that a later step may still read once ``num_tokens`` are computed."""
        ...

    def kept_start(self, num_tokens: int) -> int:
        """First token that stays active: what a later step may read, and what the last one did.

        Pages wholly before it have no user any more; their last access is now.
        """
        ...

    def live_tokens(self, num_tokens: int) -> int:
        """Tokens a request of ``num_tokens`` keeps between steps."""
        ...

    def most_kept_tokens(self, num_tokens: int) -> int:
        """Most tokens that stay active between steps on the way to ``num_tokens``."""
        ...

    def prefix_length(self, page_end_tokens: int) -> int:
        """Eviction rank among pages of one age: the longest goes first (aligned eviction)."""
        ...

    def possible_prefixes(self, is_hit: Sequence[bool]) -> list[int]:
        """Every length at which the group could resume, given which tokens are cached."""
        ...


@dataclass(frozen=True)
class FullPolicy:
    """Full attention: every earlier token is read, so a hit needs all of them."""

    required_for_hit: bool = True

    def active_start(self, num_tokens: int) -> int:
        """Nothing is ever behind."""
        return 0

    def kept_start(self, num_tokens: int) -> int:
        """Nothing is ever behind."""
        return 0

    def live_tokens(self, num_tokens: int) -> int:
        """All of them."""
        return num_tokens

    def most_kept_tokens(self, num_tokens: int) -> int:
        """All of them, at the end."""
        return num_tokens

    def prefix_length(self, page_end_tokens: int) -> int:
        """Tokens up to the page's end, the same in every group that holds them."""
        return page_end_tokens

    def possible_prefixes(self, is_hit: Sequence[bool]) -> list[int]:
        """1, 2, … up to the first hole."""
        hole = next((i for i, hit in enumerate(is_hit) if not hit), len(is_hit))
        return list(range(1, hole + 1))


@dataclass(frozen=True)
class SlidingPolicy:
    """Sliding window: the next token reads the last ``window_tokens - 1``."""

    window_tokens: int
    required_for_hit: bool = True

    def active_start(self, num_tokens: int) -> int:
        """The next token is the window's last."""
        return max(0, num_tokens - (self.window_tokens - 1))

    def kept_start(self, num_tokens: int) -> int:
        """Where the window of the last computed token starts: one token earlier."""
        return max(0, num_tokens - self.window_tokens)

    def live_tokens(self, num_tokens: int) -> int:
        """The window, without the token to come."""
        return min(num_tokens, self.window_tokens - 1)

    def most_kept_tokens(self, num_tokens: int) -> int:
        """The window of the last token."""
        return min(num_tokens, self.window_tokens)

    def prefix_length(self, page_end_tokens: int) -> int:
        """As for full attention, so that both evict the same tokens."""
        return page_end_tokens

    def possible_prefixes(self, is_hit: Sequence[bool]) -> list[int]:
        """Lengths whose last ``window_tokens - 1`` tokens are all cached."""
        return _prefixes_with_tail(is_hit, self.live_tokens)


@dataclass(frozen=True)
class ChunkedPolicy:
    """Chunked-local attention (Llama 4): a token reads its own chunk only.

    Chunks start at multiples of ``chunk_tokens``.  At the end of one everything is
    behind at once: the next token starts the next.
    """

    chunk_tokens: int
    required_for_hit: bool = True

    def active_start(self, num_tokens: int) -> int:
        """Where the chunk of the next token starts."""
        return num_tokens // self.chunk_tokens * self.chunk_tokens

    def kept_start(self, num_tokens: int) -> int:
        """The same: a finished chunk is too large to keep for one more step."""
        return self.active_start(num_tokens)

    def live_tokens(self, num_tokens: int) -> int:
        """What the unfinished chunk has so far."""
        return num_tokens % self.chunk_tokens

    def most_kept_tokens(self, num_tokens: int) -> int:
        """A chunk but its last token."""
        return min(num_tokens, self.chunk_tokens - 1)

    def prefix_length(self, page_end_tokens: int) -> int:
        """As for full attention, so that both evict the same tokens."""
        return page_end_tokens

    def possible_prefixes(self, is_hit: Sequence[bool]) -> list[int]:
        """Lengths whose tokens since the chunk began are all cached; any end of a chunk."""
        return _prefixes_with_tail(is_hit, self.live_tokens)


@dataclass(frozen=True)
class StatePolicy:
    """A state stands for all tokens before it: one can resume only where it was kept."""

    required_for_hit: bool = True

    def active_start(self, num_tokens: int) -> int:
        """A state is not made of tokens: nothing is behind."""
        return 0

    def kept_start(self, num_tokens: int) -> int:
        """A state is not made of tokens: nothing is behind."""
        return 0

    def live_tokens(self, num_tokens: int) -> int:
        """One state, in the unit of the group."""
        return min(1, num_tokens)

    def most_kept_tokens(self, num_tokens: int) -> int:
        """One state."""
        return min(1, num_tokens)

    def prefix_length(self, page_end_tokens: int) -> int:
        """Tokens that the state stands for: it goes with the attention pages that end there."""
        return page_end_tokens

    def possible_prefixes(self, is_hit: Sequence[bool]) -> list[int]:
        """Lengths after whose last token the state was kept (``is_hit`` says so per token)."""
        return [length for length, hit in enumerate(is_hit, start=1) if hit]


@dataclass(frozen=True)
class DroppingPolicy(FullPolicy):
    """Full attention over ``budget_tokens`` of a long prompt (PyramidKV): shared while it is full.

    Only prompts within the budget put pages into the index, and they never drop.
    """

    budget_tokens: int = 0


@dataclass(frozen=True)
class ImagePolicy(FullPolicy):
    """Keys and values, or embeddings, of image tokens: positions count image tokens.

    Whole images only; ``possible_prefixes`` is for a prefix of whole images.
    """


def policy_of(group: GroupSpec) -> GroupPolicy:
    """The policy of a group's kind."""
    required = group.required_for_hit
    match group.kind:
        case GroupKind.FULL:
            return FullPolicy(required)
        case GroupKind.SLIDING:
            return SlidingPolicy(group.window_tokens, required)
        case GroupKind.CHUNKED:
            return ChunkedPolicy(group.window_tokens, required)
        case GroupKind.STATE:
            return StatePolicy(required)
        case GroupKind.DROPPING:
            return DroppingPolicy(required, group.window_tokens)
        case GroupKind.CROSS:
            return ImagePolicy(required)
        case GroupKind.VISION:
            return ImagePolicy(required_for_hit=False)


def _prefixes_with_tail(is_hit: Sequence[bool], tail: Callable[[int], int]) -> list[int]:
    """Lengths whose last ``tail(length)`` tokens are all cached."""
    found, run = [], 0
    for length, hit in enumerate(is_hit, start=1):
        run = run + 1 if hit else 0
        if run >= tail(length):
            found.append(length)
    return found
