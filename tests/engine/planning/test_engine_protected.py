"""Protected prefixes in the engine: what they save, and that they give way."""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from kvell.engine.planning.protected import ProtectedPrefixes
from kvell.engine.requests.limits import Limits
from kvell.engine.requests.request import RequestState
from kvell.pages.layout import Layout
from tests.engine.conftest import make_layout
from tests.engine.traffic import Traffic, limits

FULL = (0,)
MIXED = (0, 9)
CHUNK = 4


def protecting(share: float | None = 0.5, base: Limits | None = None) -> Limits:
    return replace(
        base or limits(batched=64),
        common_pool=True,
        common_pool_chunk_tokens=CHUNK,
        common_pool_share=share,
    )


def article(number: int, length: int = 24) -> list[int]:
    return [(number * 13 + i * (number + 2)) % 47 for i in range(length)]


def ask(traffic: Traffic, name: str, of: int, length: int = 24) -> int:
    """A question about an article, answered before anything else; its cached tokens."""
    question = [48, sum(map(ord, name)) % 47, len(traffic.prompts) % 47]
    traffic.submit(name, article(of, length) + question, max_tokens=2)
    traffic.run()
    return traffic.finished(name).cached_tokens


def articles_in_turn(traffic: Traffic, articles: int, rounds: int) -> int:
    """Ask in the worst order for LRU: round after round."""
    return sum(ask(traffic, f"{r}/{a}", a) for r in range(rounds) for a in range(articles))


@pytest.mark.parametrize("windows", [FULL, MIXED])
def test_protected_articles_hit_where_least_recently_used_never_does(
    windows: tuple[int, ...],
) -> None:
    layout = make_layout(windows, num_large=30 if windows == FULL else 40)
    off, on = Traffic(layout, limits(batched=64)), Traffic(layout, protecting())
    without, with_pool = (articles_in_turn(t, articles=6, rounds=6) for t in (off, on))
    assert without <= with_pool
    assert with_pool >= 4 * 24, "an article at least hits from its third question on"
    assert on.core.stats().protected_prefixes >= 1
    assert off.core.stats().protected_prefixes == 0


def test_without_the_pool_the_same_articles_do_not_hit() -> None:
    traffic = Traffic(make_layout(FULL, 30), limits(batched=64))
    assert articles_in_turn(traffic, articles=6, rounds=6) == 0


def test_stats_tell_what_is_protected_and_letting_go_leaves_a_cache() -> None:
    traffic = Traffic(make_layout(MIXED, 60), protecting())
    assert ask(traffic, "a", 1) == 0
    assert traffic.core.stats().protected_prefixes == 0, "nobody shares it yet"
    ask(traffic, "b", 1)
    ask(traffic, "c", 1)
    stats = traffic.core.stats()
    assert (stats.protected_prefixes, stats.protected_tokens) == (1, 24)
    assert any(traffic.core.memory.snapshot().used)
    traffic.core.scheduler.drop_reserves()
    assert not any(traffic.core.memory.snapshot().used)
    assert traffic.core.stats().protected_tokens == 0
    assert ask(traffic, "d", 1) >= 24, "it is cached still"


def test_salts_share_nothing() -> None:
    traffic = Traffic(make_layout(MIXED, 60), protecting())
    for n, salt in enumerate(("x", "y", "z")):
        traffic.submit(f"q{n}", article(1), salt=salt)
        traffic.run()
    assert traffic.core.stats().protected_prefixes == 0


def filled_with_leases(layout: Layout) -> Traffic:
    """Two articles protected, in most of the pool."""
    traffic = Traffic(layout, protecting(share=1.0))
    for n in range(3):
        ask(traffic, f"a{n}", 1)
        ask(traffic, f"b{n}", 2)
    assert traffic.core.stats().protected_prefixes == 2
    return traffic


@pytest.mark.parametrize(("prompt_tokens", "max_tokens", "left"), [(56, 8, 0), (4, 40, 1)])
def test_leases_give_way_before_anybody_is_preempted(
    prompt_tokens: int, max_tokens: int, left: int
) -> None:
    """To a request that needs the whole pool, and to one that grows."""
    traffic = filled_with_leases(make_layout(FULL, 16))
    traffic.submit("large", article(9, prompt_tokens), max_tokens=max_tokens)
    traffic.run()
    assert len(traffic.tokens("large")) == max_tokens
    assert traffic.finished("large").preemptions == 0
    assert traffic.core.stats().protected_prefixes <= left


def test_what_is_least_worth_gives_way_first() -> None:
    traffic = filled_with_leases(make_layout(FULL, 16))
    for n in range(3):
        ask(traffic, f"again{n}", 1)
    traffic.submit("grows", article(9, 4), max_tokens=16)
    traffic.run()
    assert traffic.core.stats().protected_prefixes == 1
    assert ask(traffic, "last", 1) >= 24


def test_the_pool_is_off_unless_asked_for() -> None:
    layout = make_layout(MIXED, 30)
    plain, off = Traffic(layout, limits(batched=64)), Traffic(layout, limits(batched=64))
    off_limits = replace(limits(batched=64), common_pool_share=0.5)
    other = Traffic(layout, off_limits)
    for traffic in (plain, off, other):
        articles_in_turn(traffic, articles=4, rounds=3)
    assert plain.plans == off.plans == other.plans


def test_the_shadow_decides_unless_told() -> None:
    """With one seat there is no batch to lose: only hits count."""
    tight = protecting(share=None, base=limits(batched=64, seats=1))
    traffic = Traffic(make_layout(FULL, 30), tight)
    assert articles_in_turn(traffic, articles=6, rounds=20) >= 10 * 24


def test_the_same_inputs_give_the_same_plans() -> None:
    layout = make_layout(MIXED, 40)
    first, second = (Traffic(layout, protecting()) for _ in range(2))
    for traffic in (first, second):
        articles_in_turn(traffic, articles=5, rounds=4)
    assert first.plans == second.plans


@dataclass
class Asking:
    """The part of a running request that decides; its whole prompt is computed."""

    prompt: npt.NDArray[np.int32]
    cache_root: str = ""
    images: None = None
    cached_tokens: int = 0
    runs_alone: bool = False
    state: RequestState = RequestState.RUNNING

    @property
    def settled(self) -> int:
        return len(self.prompt)

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        return self.prompt[start:stop]


class Counting:
    """A core that hits this many tokens of every prompt, and keeps the open handles."""

    def __init__(self, layout: Layout, hit_tokens: int) -> None:
        self.layout, self._hit_tokens = layout, hit_tokens
        self.held: set[int] = set()
        self._opened = 0

    def open(self, *_: object) -> int:
        self._opened += 1
        self.held.add(self._opened)
        return self._opened

    def hit_tokens(self, _handle: int) -> int:
        return self._hit_tokens

    def close(self, handle: int, *, renew: bool = True) -> None:
        self.held.remove(handle)


@pytest.mark.parametrize(("hit_tokens", "leases"), [(0, 0), (24, 1)])
def test_several_reach_a_prefix_in_one_step(hit_tokens: int, leases: int) -> None:
    """Whether the prefix is still cached or not: at most one lease; all other handles close."""
    core = Counting(make_layout(FULL, 60), hit_tokens)
    protected = ProtectedPrefixes(cast(Any, core), protecting())
    prompts = (np.array([*article(1), 48, number], np.int32) for number in range(4))
    asking = [Asking(prompt) for prompt in prompts]
    for request in asking:
        protected.on_admitted(cast(Any, request), expected_output=2, unfinished=4)
    protected.renew(cast(Any, asking))
    assert (protected.prefixes, len(core.held)) == (leases, leases)
    assert protected.tokens == 24 * leases
