"""The shadow cache against one that looks at everything anew, and what share it asks for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.prefix.eviction.shadow import (
    HALF_LIFE_REQUESTS,
    MARGIN,
    Chain,
    HitRates,
    PastRequest,
    Room,
    ShadowCache,
    best_share,
    chain_of,
    hit_rates,
    luck,
    renew,
    shared_chunks,
    work_tokens,
)
from tests.depth import many


class ObviousShadow:
    """The same cache as sorted lists of everything there ever was."""

    def __init__(self, capacity: int, protected: int) -> None:
        self.capacity, self.most = capacity, min(protected, capacity)
        self.uses: dict[int, list[int]] = {}
        self.depths: dict[int, int] = {}
        self.recent: list[int] = []
        self.protected: set[int] = set()
        self.partings: set[int] = set()
        self.count = 0

    def use(self, chain: Chain) -> tuple[int, int]:
        there = leading([key in self.recent or key in self.protected for key in chain])
        sure = [
            i
            for i in range(1, there + 1)
            if chain[i - 1] in self.partings and chain[i - 1] in self.protected
        ]
        known = leading([key in self.uses for key in chain])
        if known:
            self.partings.add(chain[known - 1])
        self.count += 1
        for depth in reversed(range(len(chain))):
            self.take(chain[depth], depth)
        for key in [key for key in chain[:known] if key not in self.protected]:
            if not self.protect(key):
                break
        room = self.capacity - len(self.protected)
        self.recent = self.recent[max(0, len(self.recent) - room) :]
        return there, max(sure, default=0)

    def take(self, key: int, depth: int) -> None:
        self.depths[key] = depth
        self.uses.setdefault(key, []).append(self.count)
        if key not in self.protected:
            self.recent = [other for other in self.recent if other != key] + [key]

    def protect(self, key: int) -> bool:
        if len(self.protected) >= self.most:
            ranked = sorted(self.protected, key=lambda k: (self.value(k), -self.depths[k], k))
            if not ranked or self.value(key) < self.value(ranked[0]) + MARGIN:
                return False
            self.protected.remove(ranked[0])
            self.recent.insert(0, ranked[0])
        self.recent.remove(key)
        self.protected.add(key)
        return True

    def value(self, key: int) -> float:
        value = None
        for at in self.uses[key]:
            value = renew(value, times()[at])
        assert value is not None
        return value


def leading(flags: list[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def times() -> list[float]:
    """Running sums, as the cache makes them: equal values must be equal to the last bit."""
    now, found = 0.0, [0.0]
    for _ in range(64):
        now += 1 / HALF_LIFE_REQUESTS
        found.append(now)
    return found


def chain(*branches: int) -> Chain:
    keys = [0]
    for branch in branches:
        keys.append(keys[-1] * 5 + branch + 1)
    return tuple(keys[1:])


chains = st.lists(st.integers(0, 3), max_size=5).map(lambda branches: chain(*branches))


@many()
@given(st.integers(1, 12), st.integers(0, 14), st.lists(chains, max_size=40))
def test_it_hits_what_the_obvious_cache_hits(
    capacity: int, protected: int, asked: list[Chain]
) -> None:
    shadow, obvious = ShadowCache(capacity, protected), ObviousShadow(capacity, protected)
    for each in asked:
        assert shadow.use(each) == obvious.use(each)


@given(st.lists(chains, min_size=1, max_size=30))
def test_with_room_for_all_every_known_chunk_hits(asked: list[Chain]) -> None:
    shadow, seen = ShadowCache(1000, 300), set[int]()
    for each in asked:
        assert shadow.use(each)[0] == leading([key in seen for key in each])
        seen.update(each)


def test_keys_name_a_chunk_with_all_before_it() -> None:
    tokens = np.arange(20, dtype=np.int32)
    other = tokens.copy()
    other[5] = 99
    keys, others = chain_of(tokens, "", 4), chain_of(other, "", 4)
    assert len(keys) == 5
    assert keys[:1] == others[:1]
    assert not set(keys[1:]) & set(others[1:])
    assert shared_chunks(keys, others) == 1
    assert chain_of(tokens[:11], "", 4) == keys[:2], "what is no whole chunk has no key"


def test_roots_share_no_keys_and_the_same_prompt_has_the_same_ones() -> None:
    tokens = np.arange(16, dtype=np.int32)
    assert chain_of(tokens, "a", 4) == chain_of(tokens.copy(), "a", 4)
    assert not set(chain_of(tokens, "a", 4)) & set(chain_of(tokens, "b", 4))


def test_a_value_grows_with_uses_and_fades_with_time() -> None:
    once_now = renew(None, 1.0)
    assert renew(renew(None, 0.0), 0.0) == pytest.approx(1.0), "two uses at once: 2^1"
    assert renew(renew(None, 0.0), 0.0) == pytest.approx(once_now), "one use, a half-life later"
    assert renew(renew(None, 0.0), 1.0) > once_now


def past(*asked: Chain, hit_tokens: int = 0) -> list[PastRequest]:
    return [PastRequest(each, 4 * len(each), 0, hit_tokens) for each in asked]


def alternating(rounds: int) -> list[PastRequest]:
    """A prefix of two chunks that returns after six chunks that never do."""
    prefix, asked = chain(0, 0), list[Chain]()
    for index in range(rounds):
        asked += [prefix, tuple(range(1000 + 6 * index, 1006 + 6 * index))]
    return past(*asked)


def test_protection_keeps_what_scans_would_push_out() -> None:
    room = Room(6, 2, 1)
    assert hit_rates(alternating(10), room, 0.0, 4) == HitRates(0, 0)
    protected = hit_rates(alternating(10), room, 0.5, 4)
    # Of 80 chunks, the prefix's two hit from the third time on, or from the second if still there.
    assert protected.most == pytest.approx(16 / 80)
    assert protected.least == protected.most


def test_the_share_is_what_makes_the_least_work() -> None:
    share = best_share(alternating(20), Room(6, 1, 1), 0.0, 4)
    assert share == 0.375, "two of six chunks, and no more"


def test_no_share_where_nothing_is_shared_or_all_fits() -> None:
    apart = past(*(tuple(range(6 * i, 6 * i + 6)) for i in range(20)))
    assert best_share(apart, Room(6, 1, 1), 0.0, 4) == 0.0
    lucky = past(*[chain(0, 0)] * 9, hit_tokens=8)
    assert best_share(lucky, Room(60, 1, 1), 0.0, 4) == 0.0


def test_no_share_where_the_batch_is_worth_more() -> None:
    many_outputs = [PastRequest(p.chain, p.prompt_tokens, 500) for p in alternating(20)]
    assert best_share(many_outputs, Room(6, 0.5, 100), 0.0, 4) == 0.0


def test_luck_is_where_the_truth_lay() -> None:
    requests = past(chain(0, 0), chain(0, 0), hit_tokens=2)
    assert luck(requests, HitRates(most=0.5, least=0.0)) == pytest.approx(0.5)
    assert luck(requests, HitRates(most=0.2, least=0.1)) == 1.0
    assert luck(requests, HitRates(most=0.8, least=0.5)) == 0.0
    assert HitRates(0.5, 0.1).at(0.25) == pytest.approx(0.2)


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5]))
def test_more_hits_or_less_protected_is_never_more_work(
    hits: float, more: float, share: float
) -> None:
    requests, room = alternating(3), Room(60, 5, 8)
    low, high = sorted((hits, more))
    assert work_tokens(requests, room, share, high) <= work_tokens(requests, room, share, low)
    assert work_tokens(requests, room, 0.0, hits) <= work_tokens(requests, room, share, hits)
    assert 1 <= room.batch(share) <= 8
