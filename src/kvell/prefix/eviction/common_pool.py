"""The common page pool: the choice of prefixes to protect, and the memory for all of them.

A prefix that two recent requests shared is worth protecting: its pages stay while no request
uses them.  A lease protects them; this module decides which leases to take and which to give
up.  It has no access to pages, clock or core.

::

    note(request) ──► history (bounded) ──► shadow: how many bytes? ──► limit
         │                  │
         └─► shared prefix  └─► uses of each prefix, fading
                 │                        │
    plan(reached) ──► worth = uses × tokens ÷ bytes ──► open the best, close the least

The limit is recomputed every ``RESIZE_REQUESTS`` requests (:mod:`.shadow`), and before that
at each power of two of requests, from ``FIRST_RESIZE`` on.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from kvell.pages.layout import Layout
from kvell.prefix.eviction.shadow import (
    CHUNK_TOKENS,
    HALF_LIFE_REQUESTS,
    MARGIN,
    Chain,
    PastRequest,
    Room,
    best_share,
    renew,
)
from kvell.prefix.groups.capacity import request_bytes

RESIZE_REQUESTS = 64
"""The number of requests between two computations of the limit."""
FIRST_RESIZE = 8
HISTORY_CHUNKS = 1 << 14
"""The largest number of prompt chunks in the history: a few MB of keys, 8 million tokens."""
HISTORY_REQUESTS = 1 << 10
MOST_PREFIXES = 256
LONG_CHUNKS = 1 << 8
"""The length from which a further chunk costs only its tokens: windows and states are full."""


@dataclass(frozen=True)
class PoolCost:
    """The bytes that protected prefixes take.

    :param chunk_bytes: the cost of one more chunk of tokens.
    :param holder_bytes: the cost of the windows and states at a prefix's end.
    """

    pool_bytes: int
    chunk_bytes: int
    holder_bytes: int

    def bytes_of(self, chunks: int, holders: int = 1) -> int:
        return chunks * self.chunk_bytes + holders * self.holder_bytes


@dataclass(frozen=True)
class PoolPlan:
    """The leases to give up, and then the leases to take."""

    closes: tuple[Chain, ...] = ()
    opens: tuple[Chain, ...] = ()


def pool_cost(layout: Layout, chunk_tokens: int = CHUNK_TOKENS) -> PoolCost:
    """Return the cost of prefixes in a layout; no ``chunk_bytes`` if no group keeps all tokens."""
    tokens = LONG_CHUNKS * chunk_tokens
    long, longer = request_bytes(layout, tokens), request_bytes(layout, 2 * tokens)
    chunk_bytes = (longer - long) // LONG_CHUNKS
    holder_bytes = max(0, long - LONG_CHUNKS * chunk_bytes)
    return PoolCost(layout.pool_bytes, chunk_bytes, holder_bytes)


class CommonPool:
    """The choice of leases to hold; the caller takes them (:meth:`plan`) and reports failures.

    :param fixed_share: the fraction of memory that may be protected; None lets the shadow find it.
    """

    def __init__(
        self,
        cost: PoolCost,
        chunk_tokens: int = CHUNK_TOKENS,
        fixed_share: float | None = None,
    ) -> None:
        self.share = fixed_share or 0.0
        self._is_fixed = fixed_share is not None
        self._cost = cost
        self._chunk_tokens = chunk_tokens
        self._past: deque[PastRequest] = deque()
        self._past_chunks = 0
        self._uses: Counter[int] = Counter()
        self._values: dict[int, float] = {}
        self._noted = 0
        self._protected: dict[int, Chain] = {}
        self._covered: Counter[int] = Counter()

    @property
    def limit_bytes(self) -> int:
        return int(self.share * self._cost.pool_bytes)

    @property
    def protected(self) -> tuple[Chain, ...]:
        return tuple(self._protected.values())

    @property
    def protected_bytes(self) -> int:
        """The bytes of the protected prefixes; chunks in several of them count once."""
        return self._cost.bytes_of(len(self._covered), len(self._protected))

    @property
    def protected_tokens(self) -> int:
        """The tokens of the protected prefixes; shared ones count once."""
        return len(self._covered) * self._chunk_tokens

    # ------------------------------------------------------------------- history

    def note(self, request: PastRequest, most_running: int) -> Chain:
        """Record a request and return the prefix that it shares with an earlier request."""
        shared = 0
        while shared < len(request.chain) and self._uses[request.chain[shared]]:
            shared += 1
        self._noted += 1
        now = self._noted / HALF_LIFE_REQUESTS
        for key in request.chain:
            self._values[key] = renew(self._values.get(key), now)
        self._uses.update(request.chain)
        self._past.append(request)
        self._past_chunks += len(request.chain)
        self._forget()
        if self._is_time_to_resize():
            self._resize(most_running)
        return request.chain[:shared]

    def _is_time_to_resize(self) -> bool:
        if self._is_fixed:
            return False
        if self._noted < RESIZE_REQUESTS:
            return self._noted >= FIRST_RESIZE and self._noted.bit_count() == 1
        return self._noted % RESIZE_REQUESTS == 0

    def _forget(self) -> None:
        while self._past_chunks > HISTORY_CHUNKS or len(self._past) > HISTORY_REQUESTS:
            gone = self._past.popleft()
            self._past_chunks -= len(gone.chain)
            for key in gone.chain:
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._uses[key], self._values[key]

    def _resize(self, most_running: int) -> None:
        if not self._cost.chunk_bytes or not self._past:
            return
        tokens = sum(past.prompt_tokens + past.output_tokens for past in self._past)
        chunks = tokens / len(self._past) / self._chunk_tokens
        room = Room(
            self._cost.pool_bytes // self._cost.chunk_bytes,
            chunks + self._cost.holder_bytes / self._cost.chunk_bytes,
            most_running,
        )
        self.share = best_share(list(self._past), room, self.share, self._chunk_tokens)

    # ------------------------------------------------------------------ deciding

    def plan(self, reached: Sequence[Chain] = ()) -> PoolPlan:
        """Return the leases to give up and to take now that ``reached`` prefixes are computed."""
        before = dict(self._protected)
        for chain in reached:
            self._consider(chain)
        while self.protected_bytes > self.limit_bytes and self._protected:
            self.remove(self.least())
        after = self._protected
        return PoolPlan(
            tuple(chain for key, chain in before.items() if key not in after),
            tuple(chain for key, chain in after.items() if key not in before),
        )

    def least(self, but: Chain = ()) -> Chain:
        """Return the protected prefix with the least worth, other than ``but``.

        :raises ValueError: if no other prefix is protected.
        """
        others = (chain for chain in self._protected.values() if chain != but)
        return min(others, key=lambda chain: (self._worth(chain), chain[-1]))

    def remove(self, chain: Chain) -> None:
        del self._protected[chain[-1]]
        self._covered.subtract(chain)
        for key in chain:
            if not self._covered[key]:
                del self._covered[key]

    def _consider(self, chain: Chain) -> None:
        if not chain or chain[-1] in self._protected or chain[-1] not in self._values:
            return
        if self._cost.bytes_of(len(chain)) > self.limit_bytes:
            return
        before = list(self._protected.values())
        for other in self._replaced_by(chain):
            self.remove(other)
        self._add(chain)
        while self.protected_bytes > self.limit_bytes or len(self._protected) > MOST_PREFIXES:
            least = self.least(but=chain) if len(self._protected) > 1 else None
            if least is None or self._worth(least) + MARGIN > self._worth(chain):
                self._protected.clear()
                self._covered.clear()
                for other in before:
                    self._add(other)
                return
            self.remove(least)

    def _add(self, chain: Chain) -> None:
        self._protected[chain[-1]] = chain
        self._covered.update(chain)

    def _replaced_by(self, chain: Chain) -> list[Chain]:
        uses = self._uses[chain[-1]]
        return [
            other
            for other in self._protected.values()
            if len(other) < len(chain)
            and chain[len(other) - 1] == other[-1]
            and self._uses[other[-1]] <= uses + 1
        ]

    def _worth(self, chain: Chain) -> float:
        """Return log2 of uses × tokens ÷ bytes for the chunks that only this prefix protects."""
        value = self._values.get(chain[-1])
        if value is None:
            return float("-inf")
        covered = sum(1 for key in chain if self._covered[key] == 1)
        tokens = max(1, covered) * self._chunk_tokens
        return value + log2(tokens / max(1, self._cost.bytes_of(covered)))
