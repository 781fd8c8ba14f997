"""The learned eviction rule over pages, with keys that carry the classes of ``hazard``.

A key carries its class in its last number, together with ``prefix_length``, so pool and index need
no classes.  Only pages of rank ``NORMAL`` are ordered by worth.  Pages kept only while memory is
idle are still evicted first, in least recently used order.
"""

from math import inf

from kvell.pages.snapshot import Key
from kvell.prefix.eviction.hazard import CHUNK_TOKENS, REFIT_REQUESTS, HazardRule, Learn, learn
from kvell.prefix.eviction.shadow import chain_of
from tests.oracle.eviction.evictor import NORMAL, Ending, Place
from tests.oracle.eviction.hazard import HazardTable, Run, class_of

PREFIX_BITS = 32
"""The bits of the prefix length in a key's last number: prefixes are shorter than 4 G tokens."""
RUNNING_STEPS = 64
"""The age up to which pages released by a running request are kept like the pages that it uses. The
request renews them more often than that."""
WORTH_STEPS = 8
"""The steps between two updates of ages. The next victim hardly changes more often, and a search
looks at every class."""
_ONCE = 1
"""The kind of chunks used once, by a request with a small hit."""
_FIRST_ONCE = class_of(_ONCE, None, 0)
"""The first class of that kind. Lower numbers are the classes of pages that running requests
released; they are free, since no chunk here is partial."""


class LearnedHazard(HazardRule):
    """A :class:`tests.oracle.eviction.evictor.EvictionRule` that learns; each pool needs its own.

    A compiled core takes it as its twin's settings. Time is the step number.
    """

    def __init__(
        self,
        capacity_tokens: int,
        *,
        chunk_tokens: int = CHUNK_TOKENS,
        first_refit: int = REFIT_REQUESTS,
        learn: Learn = learn,
    ) -> None:
        super().__init__(
            capacity_tokens, chunk_tokens=chunk_tokens, first_refit=first_refit, learn=learn
        )
        self._chunk_tokens = chunk_tokens
        self._table = HazardTable(self.chunks, first_refit, learn)

    def key(self, rank: int, time: int, prefix_length: int, eviction_class: int = 0) -> Key:
        """Return the key by rank, time and longest prefix; with rank ``NORMAL``, also the class."""
        number = eviction_class if rank == NORMAL else 0
        return (rank, time, (number << PREFIX_BITS) - prefix_length)

    def eviction_class(self, key: Key) -> int:
        return -(-key[2] >> PREFIX_BITS)

    def place(self, key: Key, now: int) -> Place:
        """Return the place by rank, worth at the current age, time and longest prefix."""
        rank, time, last = key
        number = self.eviction_class(key)
        age = max(0, now - now % WORTH_STEPS - time)
        worth = self._worth(number, age) if rank == NORMAL else 0.0
        return (rank, worth, time, last - (number << PREFIX_BITS))

    def _worth(self, eviction_class: int, age: int) -> float:
        if eviction_class >= _FIRST_ONCE:
            return self._table.value(eviction_class, age)
        return inf if age <= RUNNING_STEPS else self._table.value(eviction_class + _FIRST_ONCE, age)

    def limit(self, rank: int, now: int) -> Place:
        """Return the place that lets all pages of this rank or a lower one be evicted."""
        return (rank, inf)

    def class_before(
        self, expected_output_tokens: int, will_return: bool | None, *, is_running: bool
    ) -> int:
        """Return the class of chunks used once; that of a running request is worth more than all
        others for ``RUNNING_STEPS``."""
        once = class_of(_ONCE, will_return, expected_output_tokens)
        return once - _FIRST_ONCE if is_running else once

    def ended_at(self, now: int, expected: int) -> int:
        """Return the later of both times: the pages that the request released have another class
        now."""
        return max(now, expected)

    def on_access(self, ending: Ending, now: int) -> list[Run]:
        """Record that the request ended and return the classes of its prefixes, by tokens."""
        runs = self._table.access(
            chain_of(ending.tokens, ending.root, self._chunk_tokens),
            now,
            output_tokens=ending.output_tokens,
            will_return=ending.will_return,
        )
        return [Run(run.end * self._chunk_tokens, run.eviction_class) for run in runs]
