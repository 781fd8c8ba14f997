"""A shadow cache, which replays recent requests to find how much memory to protect.

A prompt is a chain of keys, one for each chunk of tokens; a key names the chunk together with
all chunks before it.  The shadow holds keys where the pool holds pages::

    ┌──── protected: with a limit in chunks ────┬──── the rest: least recently used ────┐
    │ used by two requests or more;             │ keys that requests hold or released    │
    │ the least used is evicted first           │                                        │
    └───────────────────────────────────────────┴────────────────────────────────────────┘

If layers keep a window or a state, a prompt resumes only where these were kept: certainly
at the branch points of protected prefixes, elsewhere by luck.  The requests' true hits measure
the luck.  The replay counts the tokens present (``most``) and those surely resumable
(``least``).  For every share, the true number is assumed to be at the same fraction between the
two (:func:`luck`).

A key's value counts the requests that used it; a use halves in weight every
``HALF_LIFE_REQUESTS`` requests.  Fading alone never changes the order of two values.

Protection should reduce the work of a request, counted in tokens computed::

    work(share) = prompt × (1 − hit_rate(share)) + output × STEP_TOKENS ÷ batch(share)

A hit saves tokens of the prompt.  An output token takes a step, whose fixed cost (reading the
weights) ``batch`` requests share; the batch is what fits into the rest of the memory.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log2

from kvell.prefix.tokens import Tokens

Chain = tuple[int, ...]
"""The keys of a prompt's whole chunks, first chunk first."""

CHUNK_TOKENS = 512
HALF_LIFE_REQUESTS = 64
MARGIN = 0.5
"""The lead in value, in log2, that a new key needs to displace another. Without it, alternating
prefixes would displace each other, because the newest always has the larger value."""
STEP_TOKENS = 200
"""The number of tokens whose computation takes as long as reading the weights once: operations per
byte of memory traffic of today's accelerators, within a factor of two."""
SHARES = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)
"""The fractions of memory that are tried as the protected part."""
LEAST_GAIN = 0.02
"""The fraction of work that protection must save; less is within the model's error."""


@dataclass(frozen=True)
class PastRequest:
    """A request in the replay."""

    chain: Chain
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0


@dataclass(frozen=True)
class HitRates:
    """The hit rates of a replay: of all present tokens, and of surely resumable ones."""

    most: float
    least: float

    def at(self, lucky: float) -> float:
        """Return the hit rate at a fraction between ``least`` (0) and ``most`` (1)."""
        return self.least + lucky * (self.most - self.least)


@dataclass(frozen=True)
class Room:
    """The memory, counted in chunks of a prefix.

    :param capacity_chunks: the chunks that the whole pool holds.
    :param request_chunks: the chunks that a running request takes on average.
    :param most_running: the most requests that run together with any memory.
    """

    capacity_chunks: int
    request_chunks: float
    most_running: int

    def batch(self, share: float) -> float:
        fitting = (1 - share) * self.capacity_chunks / max(1.0, self.request_chunks)
        return max(1.0, min(float(self.most_running), fitting))


def chain_of(tokens: Tokens, root: str, chunk_tokens: int = CHUNK_TOKENS) -> Chain:
    """Return the keys of the whole chunks of a prompt (int32 [n]); different roots share none."""
    data = memoryview(tokens.astype("<i4", copy=False).tobytes())
    link = blake2b(root.encode(), digest_size=8).digest()
    size = chunk_tokens * 4
    keys = list[int]()
    for start in range(0, len(data) - size + 1, size):
        link = blake2b(data[start : start + size], digest_size=8, key=link).digest()
        keys.append(int.from_bytes(link, "little"))
    return tuple(keys)


def shared_chunks(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of leading keys that two chains share."""
    same = 0
    for key, other in zip(left, right, strict=False):
        if key != other:
            break
        same += 1
    return same


def renew(value: float | None, now: float) -> float:
    """Return the value after one more use: log2 of the sum of 2^time of all uses (half-lives)."""
    return now if value is None else now + log2(1 + 2 ** (value - now))


class ShadowCache:
    """Keys of chunks under a limit, part of them protected."""

    def __init__(self, capacity_chunks: int, protected_chunks: int = 0) -> None:
        self._partings: set[int] = set()
        self._capacity = capacity_chunks
        self._most_protected = min(protected_chunks, capacity_chunks)
        self._values: dict[int, float] = {}
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._protected: dict[int, float] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._now = 0.0

    def use(self, chain: Chain) -> tuple[int, int]:
        """Replay a request and return two counts: its leading chunks that were present, and those
        of them before a protected branch point."""
        there = sure = _leading(chain, lambda key: key in self._recent or key in self._protected)
        while sure and not (
            chain[sure - 1] in self._partings and chain[sure - 1] in self._protected
        ):
            sure -= 1
        self._now += 1 / HALF_LIFE_REQUESTS
        seen = _leading(chain, self._values.__contains__)
        self._partings.update(chain[max(0, seen - 1) : seen])
        for depth in range(len(chain) - 1, -1, -1):
            self._touch(chain[depth], depth)
        for depth in range(seen):
            if chain[depth] not in self._protected and not self._protect(chain[depth], depth):
                break
        while len(self._recent) > self._capacity - len(self._protected):
            self._recent.popitem(last=False)
        return there, sure

    def _touch(self, key: int, depth: int) -> None:
        value = self._values[key] = renew(self._values.get(key), self._now)
        if key in self._protected:
            self._protected[key] = value
            heapq.heappush(self._heap, (value, -depth, key))
        else:
            self._recent[key] = None
            self._recent.move_to_end(key)

    def _protect(self, key: int, depth: int) -> bool:
        value = self._values[key]
        if len(self._protected) >= self._most_protected and not self._displace(value):
            return False
        del self._recent[key]
        self._protected[key] = value
        heapq.heappush(self._heap, (value, -depth, key))
        return True

    def _displace(self, value: float) -> bool:
        """Stop protecting the least valuable key; among equals the deepest, so that prefixes stay
        whole."""
        while self._heap and self._protected.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap or value < self._heap[0][0] + MARGIN:
            return False
        _, _, key = heapq.heappop(self._heap)
        del self._protected[key]
        self._recent[key] = None
        self._recent.move_to_end(key, last=False)
        return True


def _leading(chain: Chain, holds: Callable[[int], bool]) -> int:
    return next((i for i, key in enumerate(chain) if not holds(key)), len(chain))


def hit_rates(
    past: Sequence[PastRequest], room: Room, share: float, chunk_tokens: int = CHUNK_TOKENS
) -> HitRates:
    """Return the hit rates of the prompts' tokens if ``share`` of the memory were protected."""
    cache = ShadowCache(room.capacity_chunks, int(share * room.capacity_chunks))
    hits = [cache.use(request.chain) for request in past]
    tokens = max(1, sum(request.prompt_tokens for request in past))
    most, least = (sum(column) * chunk_tokens / tokens for column in zip(*hits, strict=True))
    return HitRates(most, least)


def luck(past: Sequence[PastRequest], rates: HitRates) -> float:
    """Return the true hits as a fraction between ``least`` (0) and ``most`` (1)."""
    if rates.most <= rates.least:
        return 1.0
    hits = sum(request.hit_tokens for request in past)
    true = hits / max(1, sum(request.prompt_tokens for request in past))
    return min(1.0, max(0.0, (true - rates.least) / (rates.most - rates.least)))


def work_tokens(past: Sequence[PastRequest], room: Room, share: float, hits: float) -> float:
    count = max(1, len(past))
    prompt = sum(request.prompt_tokens for request in past) / count
    output = sum(request.output_tokens for request in past) / count
    return prompt * (1 - hits) + output * STEP_TOKENS / room.batch(share)


def best_share(
    past: Sequence[PastRequest],
    room: Room,
    share_now: float = 0.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> float:
    """Return the share of memory with the least work, or 0 if it saves less than ``LEAST_GAIN``.

    :param past: at least one request.
    :param share_now: the protected share when the true hits were counted.
    """
    rates = {share: hit_rates(past, room, share, chunk_tokens) for share in SHARES}
    now = rates.get(share_now) or hit_rates(past, room, share_now, chunk_tokens)
    lucky = luck(past, now)
    work = {share: work_tokens(past, room, share, rates[share].at(lucky)) for share in SHARES}
    best = min(SHARES, key=lambda share: (work[share], share))
    return best if work[best] <= work[0.0] * (1 - LEAST_GAIN) else 0.0
