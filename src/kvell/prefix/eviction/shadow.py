"""What a protected part of the cache would have been worth: recent requests, replayed.

A prompt is a chain of keys, one for each chunk of tokens, which names the chunk together
with all before it.  The shadow holds keys where the pool holds pages::

    ┌──── protected: at most so many chunks ────┬──── the rest: least recently used ────┐
    │ used by two requests or more;             │ what requests hold, and what they      │
    │ the least used goes first                 │ left behind                            │
    └───────────────────────────────────────────┴────────────────────────────────────────┘

Where layers keep a window or a state, a prompt resumes only where these were kept: surely
where protected prefixes part, elsewhere with luck.  How much luck, the requests' true hits
tell: the replay counts what lies there (``most``) and what is sure (``least``), and the truth
is taken to be as far between the two, whatever the share, as it was (:func:`luck`).

"Used" counts requests, a use half as much for every ``HALF_LIFE_REQUESTS`` that came since:
a value that grows with uses and fades, in an order that time alone never changes.

The work of a request, counted in tokens computed, is what protection is to lessen::

    work(share) = prompt × (1 − hit_rate(share)) + output × STEP_TOKENS ÷ batch(share)

A hit spares a prompt's tokens.  An output token takes a step, whose fixed cost (reading the
weights) ``batch`` requests bear together; and the batch is what the rest of the memory holds.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log2

from kvell.prefix.index.radix import Tokens

Chain = tuple[int, ...]
"""Keys of a prompt's whole chunks, first chunk first."""

CHUNK_TOKENS = 512
HALF_LIFE_REQUESTS = 64
MARGIN = 0.5
"""A newcomer displaces what is worth less by this, in log2: else prefixes that come in turn
would push each other out, each the newest when it comes."""
STEP_TOKENS = 200
"""Tokens whose computing takes as long as reading the weights once: operations per byte of
memory traffic of today's accelerators, within a factor of two."""
SHARES = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.75)
"""Parts of the memory that are tried as the protected one."""
LEAST_GAIN = 0.02
"""Part of the work that protection must save: less is within the model's error."""


@dataclass(frozen=True)
class PastRequest:
    """What the replay needs to know of a request."""

    chain: Chain
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int = 0


@dataclass(frozen=True)
class HitRates:
    """What lies in the cache, and what of it can surely be resumed from."""

    most: float
    least: float

    def at(self, lucky: float) -> float:
        """So far from ``least`` to ``most``."""
        return self.least + lucky * (self.most - self.least)


@dataclass(frozen=True)
class Room:
    """The memory, in chunks of a prefix.

    :param capacity_chunks: chunks that the whole pool holds.
    :param request_chunks: what a running request takes, on average.
    :param most_running: requests that run at once, however much memory there is.
    """

    capacity_chunks: int
    request_chunks: float
    most_running: int

    def batch(self, share: float) -> float:
        """Requests that run at once beside a protected part."""
        fitting = (1 - share) * self.capacity_chunks / max(1.0, self.request_chunks)
        return max(1.0, min(float(self.most_running), fitting))


def chain_of(tokens: Tokens, root: str, chunk_tokens: int = CHUNK_TOKENS) -> Chain:
    """Keys of the whole chunks of a prompt (int32 [n]); different roots share none."""
    data = memoryview(tokens.astype("<i4", copy=False).tobytes())
    link = blake2b(root.encode(), digest_size=8).digest()
    size, keys = chunk_tokens * 4, list[int]()
    for start in range(0, len(data) - size + 1, size):
        link = blake2b(data[start : start + size], digest_size=8, key=link).digest()
        keys.append(int.from_bytes(link, "little"))
    return tuple(keys)


def shared_chunks(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading keys that two chains share."""
    same = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        same += 1
    return same


def renewed(value: float | None, now: float) -> float:
    """The value after one more use: log2 of the sum of 2^time over all uses, in half-lives."""
    return now if value is None else now + log2(1 + 2 ** (value - now))


class ShadowCache:
    """Keys of chunks under a limit, part of them protected; :meth:`use` a chain after another."""

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
        """A request with this prompt: how many of its first chunks were there, and how many of
        these up to a parting that was protected."""
        there = sure = _leading(chain, self._has)
        while sure and not self._is_sure(chain[sure - 1]):
            sure -= 1
        self._now += 1 / HALF_LIFE_REQUESTS
        known = _leading(chain, self._values.__contains__)
        self._partings.update(chain[max(0, known - 1) : known])
        for depth in range(len(chain) - 1, -1, -1):
            self._touch(chain[depth], depth)
        for depth in range(known):
            if chain[depth] not in self._protected and not self._protect(chain[depth], depth):
                break
        while len(self._recent) > self._capacity - len(self._protected):
            self._recent.popitem(last=False)
        return there, sure

    def _is_sure(self, key: int) -> bool:
        return key in self._partings and key in self._protected

    def _has(self, key: int) -> bool:
        return key in self._recent or key in self._protected

    def _touch(self, key: int, depth: int) -> None:
        value = self._values[key] = renewed(self._values.get(key), self._now)
        if key in self._protected:
            self._protected[key] = value
            heapq.heappush(self._heap, (value, -depth, key))
        else:
            self._recent[key] = None
            self._recent.move_to_end(key)

    def _protect(self, key: int, depth: int) -> bool:
        """Instead of what is worth much less, if there is no room."""
        value = self._values[key]
        if len(self._protected) >= self._most_protected and not self._displace(value):
            return False
        del self._recent[key]
        self._protected[key] = value
        heapq.heappush(self._heap, (value, -depth, key))
        return True

    def _displace(self, value: float) -> bool:
        """Of equal value the deepest goes first, so that what is protected are prefixes."""
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
    """Parts of the prompts' tokens that would have been hits, with so much protected."""
    cache = ShadowCache(room.capacity_chunks, int(share * room.capacity_chunks))
    hits = [cache.use(request.chain) for request in past]
    tokens = max(1, sum(request.prompt_tokens for request in past))
    most, least = (sum(column) * chunk_tokens / tokens for column in zip(*hits, strict=True))
    return HitRates(most, least)


def luck(past: Sequence[PastRequest], rates: HitRates) -> float:
    """Where the true hits lay between ``least`` (0) and ``most`` (1)."""
    if rates.most <= rates.least:
        return 1.0
    hits = sum(request.hit_tokens for request in past)
    true = hits / max(1, sum(request.prompt_tokens for request in past))
    return min(1.0, max(0.0, (true - rates.least) / (rates.most - rates.least)))


def work_tokens(past: Sequence[PastRequest], room: Room, share: float, hits: float) -> float:
    """Mean work of these requests, in tokens computed (see above)."""
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
    """The part of the memory to protect: the least work; 0 if that saves next to nothing.

    :param past: at least one request.
    :param share_now: what was protected when the true hits were counted.
    """
    rates = {share: hit_rates(past, room, share, chunk_tokens) for share in SHARES}
    now = rates.get(share_now) or hit_rates(past, room, share_now, chunk_tokens)
    lucky = luck(past, now)
    work = {share: work_tokens(past, room, share, rates[share].at(lucky)) for share in SHARES}
    best = min(SHARES, key=lambda share: (work[share], share))
    return best if work[best] <= work[0.0] * (1 - LEAST_GAIN) else 0.0
