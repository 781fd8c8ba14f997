"""The compiled core and the oracle behind one call."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.memory import HoldingCore
from kvell.pages.audit import audit
from kvell.pages.layout import GroupKind, GroupSpec, Layout
from kvell.pages.snapshot import IndexEntry, PoolSnapshot
from kvell.prefix.core.compiled import CompiledCore
from kvell.prefix.groups.facts import Facts, facts_of
from kvell.prefix.groups.needs import dropped_tokens
from kvell.prefix.interface import DROPPED, MOVED, NAMED, USED, WITHHELD, VisibleCore
from tests.oracle.core.reference import ReferenceCore
from tests.oracle.eviction.hazard_rule import LearnedHazard
from tests.oracle.index.seen import cuts_image
from tests.pages.pools import Chunk, confined, dropping, group, images, literal, state

LARGE_PAGE_BYTES = 64 * 210


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.asarray(values, np.int32)


def pool_of(num_large: int, *groups: GroupSpec) -> Layout:
    return Layout(tuple(map(sized, groups)), LARGE_PAGE_BYTES, num_large)


def sized(spec: GroupSpec) -> GroupSpec:
    return replace(spec, page_stride_bytes=LARGE_PAGE_BYTES // spec.pages_per_large)


def of_model(name: str, *groups: GroupSpec) -> list[GroupSpec]:
    return [replace(spec, model=name) for spec in groups]


def by_value(state: PoolSnapshot) -> PoolSnapshot:
    def place(entry: IndexEntry) -> tuple[int, int]:
        return entry.group, entry.page

    return replace(state, index=tuple(sorted(state.index, key=place)))


def same(left: object, right: object) -> bool:
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def in_pages_order(changes: npt.NDArray[np.int32]) -> list[list[int]]:
    return sorted(changes.tolist(), key=lambda row: (row[1], row[2]))


def nothing() -> None:
    """No rule that learns."""


class Pair:
    """Both implementations behind one call that compares what they say."""

    def __init__(self, layout: Layout, rule: Callable[[], LearnedHazard | None] = nothing) -> None:
        self.layout = layout
        self.cores: tuple[VisibleCore, ...] = (
            ReferenceCore(layout, rule()),
            CompiledCore(layout, rule()),
        )
        self.named: dict[tuple[int, int], int] = {}
        """What the changes of the index amount to: (group, page) → end."""
        for core in self.cores:
            core.watch_index()

    def __call__(self, name: str, *args: object, **options: object) -> Any:
        expected, answer = (getattr(core, name)(*args, **options) for core in self.cores)
        assert same(expected, answer), (name, args, expected, answer)
        return expected

    def refused(
        self, error: type[Exception], match: str, name: str, *args: Any, **opts: Any
    ) -> None:
        """Both raise this, and nothing has changed."""
        before = self.check()
        for core in self.cores:
            with pytest.raises(error, match=match):
                getattr(core, name)(*args, **opts)
        assert self.check() == before

    def register(self, groups: list[GroupSpec]) -> None:
        self("register", groups)
        self.layout = self.cores[0].layout
        assert self.cores[1].layout == self.layout

    def check(self) -> PoolSnapshot:
        expected, state = (by_value(core.snapshot()) for core in self.cores)
        assert state == expected
        self("totals")
        self("large_pages")
        for large in range(0, self.layout.num_large_pages, 1 + self.layout.num_large_pages // 8):
            self("small_pages", large)
        assert audit(self.layout, state) == []
        self.follow()
        assert self.named == {(entry.group, entry.page): entry.end for entry in state.index}
        return state

    def follow(self) -> None:
        """Both tell the same changes, though pages evicted together go in an order of their own."""
        told, compiled = (core.index_changes() for core in self.cores)
        assert in_pages_order(told) == in_pages_order(compiled)
        for change, of, page, end, other in told.tolist():
            if change == NAMED:
                assert (of, page) not in self.named
                self.named[of, page] = end
            elif change == DROPPED:
                assert self.named.pop((of, page)) == end
            else:
                assert change == MOVED
                assert (of, other) not in self.named
                self.named[of, other] = self.named.pop((of, page))


page_sizes = st.sampled_from([1, 2, 3, 4, 6])

large_pages = st.sampled_from([1, 2, 3, 5, 70])

windows = st.sampled_from([0, 0, 1, 3, 7, 12, Chunk(1), Chunk(5), Chunk(8), Chunk(12)])

token_groups = st.builds(group, page_sizes, large_pages, windows)

merged_groups = st.builds(replace, token_groups, holds_embeddings=st.just(True))

drafter_groups = st.builds(
    replace,
    st.one_of(token_groups, st.builds(state, st.just(2), large_pages)),
    required_for_hit=st.just(False),
)

mixed_groups = st.builds(
    replace, st.builds(group, page_sizes, large_pages), counts_images=st.just(True)
)

groups_of_any_kind = st.one_of(
    token_groups,
    token_groups,
    token_groups,
    st.builds(state, st.integers(1, 3), large_pages),
    st.builds(
        images, st.sampled_from([GroupKind.CROSS, GroupKind.VISION]), page_sizes, large_pages
    ),
    st.builds(dropping, page_sizes, large_pages, st.sampled_from([1, 4, 7, 20])),
    drafter_groups,
    merged_groups,
    mixed_groups,
)

mixes = st.lists(groups_of_any_kind, min_size=1, max_size=4)

late_groups = st.lists(
    st.one_of(
        st.builds(group, page_sizes, st.sampled_from([2, 70, 105, 210]), windows),
        st.builds(state, st.integers(1, 3), st.sampled_from([1, 3, 210])),
    ),
    min_size=1,
    max_size=2,
)

few_letters = st.builds(
    lambda start, letters, times: [start, *letters * times],
    st.integers(0, 1),
    st.sampled_from([[0], [1, 0], [1, 0, 1], [0, 0, 1, 1, 1]]),
    st.sampled_from([1, 2, 3, 5, 7, 11, 40]),
)

Picture = tuple[int, int, int, int]

pictures = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 8]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2, 7]),
        st.integers(1, 2),
    ),
    min_size=1,
    max_size=3,
)


"""Text before each image, its tokens there, image tokens, what it shows."""


def with_pictures(text: list[int], shown: list[Picture]) -> tuple[list[int], list[list[int]]]:
    """A text with images in it, and where they are; equal content has equal ids and sizes."""
    tokens: list[int] = []
    rows: list[list[int]] = []
    for before, count, image_tokens, content in shown:
        tokens, text = tokens + text[:before], text[before:]
        rows.append([len(tokens), count, image_tokens])
        tokens = tokens + [-(100 * count + 10 * image_tokens + content)] * count
    return tokens + (text or [1]), rows


def cannot_receive(own: Sequence[GroupSpec], facts: Facts, computed: int) -> bool:
    """Whether what is computed does not lie in pages that can come from elsewhere."""
    is_mixed = bool(facts.images) and any(spec.counts_images for spec in own)
    drops = any(dropped_tokens(spec, facts) for spec in own)
    return is_mixed or drops or cuts_image(facts, computed)


def unit_away(own: Sequence[GroupSpec]) -> int:
    """Tokens of which a multiple may lie elsewhere; 0 if none may."""
    full = [spec.page_tokens for spec in own if spec.kind is GroupKind.FULL]
    if any(spec.kind is GroupKind.DROPPING or spec.counts_images for spec in own):
        return 0
    return math.lcm(*full) if full else 0


class LockStep(RuleBasedStateMachine):
    """Tiny pools and two letters: evictions, refusals and split edges all the time."""

    reached: ClassVar[Counter[str]] = Counter()

    @initialize(
        groups=mixes,
        others=st.one_of(st.just([]), st.just([]), mixes),
        num_large=st.one_of(st.integers(1, 10), st.integers(8, 40)),
        sharing=st.sampled_from([replace, replace, literal, confined]),
    )
    def start(
        self,
        groups: list[GroupSpec],
        others: list[GroupSpec],
        num_large: int,
        sharing: Callable[[Layout], Layout],
    ) -> None:
        layout = pool_of(num_large, *groups, *of_model("other", *others))
        self.both = self.pair(sharing(layout))
        self.models = sorted({spec.model for spec in layout.groups})
        self.step = 0
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.leases: dict[int, tuple[int, int]] = {}
        self.past: list[tuple[list[int], str, dict[str, Any]]] = []
        self.turned_away: tuple[list[int], str, dict[str, Any], int] | None = None
        self.own: dict[int, list[GroupSpec]] = {}
        self.away: dict[int, int] = {}

    def pair(self, layout: Layout) -> Pair:
        return Pair(layout)

    def some(self, chosen: int) -> list[int]:
        """Running requests by the bits of a number, the youngest first if it is odd."""
        handles = [h for i, h in enumerate(sorted(self.known)) if chosen >> i % 6 & 1]
        return handles[::-1] if chosen % 2 else handles

    def one(self, chosen: int) -> int:
        return sorted(self.known)[chosen % len(self.known)]

    def running(self, handle: int, num_tokens: int, expected: int) -> None:
        self.both("claim", handle, expected, will_return=(None, True, False)[handle % 3])
        self.known[handle] = num_tokens
        self.computed[handle] = self.both("hit_tokens", handle)

    @rule(steps=st.integers(0, 2))
    def next_step(self, steps: int) -> None:
        self.step += steps
        self.both("begin_step", self.step)
        self.leases = {h: v for h, v in self.leases.items() if v[0] >= self.step}

    @precondition(
        lambda self: "late" not in self.models and self.both.layout.quota_large_pages is None
    )
    @rule(groups=late_groups)
    def register(self, groups: list[GroupSpec]) -> None:
        self.both.register([sized(spec) for spec in of_model("late", *groups)])
        self.models.append("late")

    @rule(
        text=few_letters,
        shown=st.one_of(st.just([]), pictures),
        generated=st.sampled_from([0, 0, 0, 1, 9]),
        model=st.integers(0, 5),
        root=st.sampled_from(["", "", "", "salt"]),
        lease=st.sampled_from([None, None, None, 0, 2]),
        reuse=st.sampled_from([True] * 15 + [False]),
        fill=st.sampled_from([0, 1, 1, 2]),
    )
    def open(
        self,
        text: list[int],
        shown: list[Picture],
        generated: int,
        model: int,
        root: str,
        lease: int | None,
        reuse: bool,
        fill: int,
    ) -> None:
        tokens, rows = with_pictures(text, shown)
        options = {
            "images": np.asarray(rows, np.int32) if rows else None,
            "prompt_tokens": max(0, len(tokens) - generated) if generated else None,
            "model": self.models[model % len(self.models)],
        }
        self.begin(tokens, root, options, lease, reuse, fill)

    def begin(
        self,
        tokens: list[int],
        root: str,
        options: dict[str, Any],
        lease: int | None,
        reuse: bool,
        fill: int,
    ) -> None:
        """Open, and compute nothing, or the prompt in chunks, and maybe close."""
        hit = self.both("peek", ints(*tokens), root, **options)
        self.both("reach", ints(*tokens), root, **options)
        until = None if lease is None else self.step + lease
        handle = self.both("open", ints(*tokens), root, until, reuse=reuse, **options)
        assert self.both("hit_tokens", handle) == (hit if reuse else 0)
        self.past.append((tokens, root, options))
        self.note_opened(handle, options["model"])
        self.reached["hit beside away"] += any(self.away.values()) and hit > 0
        if until is not None:
            self.leases[handle] = until, len(tokens)
            return
        self.running(handle, len(tokens), len(tokens) + len(tokens) % 30)
        chunk = 1 + sum(tokens) % 90
        while fill and self.computed[handle] < len(tokens):
            wanted = min(len(tokens), self.computed[handle] + chunk)
            reached = self.both("largest", handle, wanted)
            if reached == self.computed[handle]:
                break
            self.compute([handle], [reached], keep=True)
        if fill > 1:
            self.forget(handle, renew=True)

    def note_opened(self, handle: int, model: str) -> None:
        self.own[handle] = [g for g in self.both.layout.groups if g.model == model]
        self.away.pop(handle, None)

    @precondition(lambda self: self.past)
    @rule(
        chosen=st.integers(0, 99),
        more=st.sampled_from([[], [1], [0, 1, 1, 0, 1]]),
        fill=st.sampled_from([0, 1, 1, 2]),
    )
    def next_turn(self, chosen: int, more: list[int], fill: int) -> None:
        """What somebody had, and maybe something else behind it."""
        tokens, root, options = self.past[chosen % len(self.past)]
        self.begin([*tokens, *more], root, options, None, True, fill)

    @precondition(lambda self: self.past)
    @rule(
        chosen=st.integers(0, 99),
        reuse=st.booleans(),
        part=st.integers(0, 9),
        ahead=st.sampled_from([0, 1, 3, 40]),
        what=st.sampled_from(["compute", "compute", "grow", "close", "leave"]),
    )
    def receive(self, chosen: int, reuse: bool, part: int, ahead: int, what: str) -> None:
        """Somebody comes back, and what it had computed from elsewhere."""
        tokens, root, options = self.past[chosen % len(self.past)]
        handle = self.both("open", ints(*tokens), root, reuse=reuse, **options)
        hit = self.both("hit_tokens", handle)
        computed = min(len(tokens) - 1, hit + part * len(tokens) // 9)
        facts = facts_of(len(tokens), options["prompt_tokens"], options["images"])
        self.note_opened(handle, options["model"])
        if cannot_receive(self.own[handle], facts, computed):
            self.both.refused(ValueError, "cannot receive", "receive", handle, computed)
            self.both("close", handle, renew=False)
            return
        self.both("receive", handle, computed)
        self.both("fits", handle, len(tokens), 1 + ahead, ints(), ints())
        if what == "leave":
            self.both("close", handle, renew=False)
            return
        self.running(handle, len(tokens), len(tokens) + ahead)
        self.computed[handle] = computed
        until = self.both("largest", handle, min(len(tokens), computed + 1 + ahead))
        if until == computed:
            self.forget(handle, renew=bool(ahead))
        elif what == "compute":
            self.compute([handle], [until], keep=True)
        else:
            self.both("grow", ints(handle), ints(until))
            if what == "close":
                self.forget(handle, renew=True)

    def compute(self, handles: list[int], until: list[int], keep: bool) -> None:
        state = self.both.check()
        served, rows = self.both("grow", ints(*handles), ints(*until))
        if keep:
            self.both("checkpoint", ints(*handles[:served]), ints(*until[:served]))
        self.both("advance", ints(*handles[:served]), ints(*until[:served]))
        self.computed.update(zip(handles[:served], until, strict=False))
        self.note_home(state, handles, rows.tolist())

    def note_home(self, before: PoolSnapshot, handles: list[int], rows: list[list[int]]) -> None:
        """Pages that came home are named unless somebody else's are at their places."""
        firsts = {h.handle: [first for first, _ in h.groups] for h in before.holders}
        home = {(g, page) for i, g, at, page in rows if at < firsts[handles[i]][g]}
        if home:
            named = {(entry.group, entry.page) for entry in self.both.check().index}
            self.reached["home and named"] += bool(home & named)
            self.reached["home beside another's"] += bool(home - named)

    @precondition(lambda self: self.known)
    @rule(
        chosen=st.integers(0, 63),
        whole=st.integers(0, 12),
        extra=st.sampled_from([0] * 15 + [-1, 1]),
        ahead=st.sampled_from([None, 0, 1, 9]),
    )
    def send_away(self, chosen: int, whole: int, extra: int, ahead: int | None) -> None:
        """More or fewer of somebody's first tokens lie elsewhere; maybe a step follows."""
        handle = self.one(chosen)
        unit, computed = unit_away(self.own[handle]), self.computed[handle]
        away = unit * (whole % (computed // unit + 1)) + extra if unit else extra
        sources = np.asarray(self.both("sources", handle)).reshape(-1, 4)
        comes_home = away < self.away.get(handle, 0)
        keeps = bool(sources[:, 3].any()) or (len(sources) > 0 and comes_home)
        if not unit or keeps or not 0 <= away <= computed or away % unit:
            self.both.refused(ValueError, "cannot be remote", "send_away", handle, away)
            self.reached["refused"] += 1
            return
        before = self.away.get(handle, 0)
        self.both("send_away", handle, away)
        self.away[handle] = away
        self.reached["more"] += away > before
        self.reached["fewer"] += away < before
        if ahead is not None:
            self.compute([handle], [min(self.known[handle], computed + ahead)], keep=True)

    def forget(self, handle: int, renew: bool, returns: bool = False) -> None:
        self.both("close", handle, renew=renew, returns=returns)
        del self.known[handle], self.computed[handle]
        self.away.pop(handle, None)

    @precondition(lambda self: self.leases)
    @rule(extra=st.integers(0, 30))
    def claim_a_lease(self, extra: int) -> None:
        handle = min(self.leases)
        _, num_tokens = self.leases.pop(handle)
        self.running(handle, num_tokens, num_tokens + extra)

    @precondition(lambda self: self.known)
    @rule(
        chosen=st.integers(1, 63),
        chunk=st.one_of(st.integers(1, 20), st.just(90)),
        compute=st.sampled_from([True, True, True, False]),
        keep=st.booleans(),
    )
    def prefill_or_decode(self, chosen: int, chunk: int, compute: bool, keep: bool) -> None:
        handles = self.some(chosen)
        until = [min(self.known[h], self.computed[h] + chunk) for h in handles]
        if compute:
            self.compute(handles, until, keep)
            return
        served, _ = self.both("grow", ints(*handles), ints(*until))
        if keep:
            self.both("checkpoint", ints(*handles[:served]), ints(*until[:served]))

    @rule(most_large=st.integers(0, 3))
    def compact(self, most_large: int) -> None:
        self.both("compact", most_large)

    @precondition(lambda self: self.both.layout.quota_large_pages is None)
    @rule(chosen=st.integers(0, 255))
    def withhold_or_restore(self, chosen: int) -> None:
        order = self.both("reclaim_order").tolist()
        picked = [i for i in range(len(order)) if chosen >> i % 8 & 1]
        self.both("restore", ints(*(i for i in picked if order[i] == WITHHELD)))
        self.both("withhold", ints(*(i for i in picked if WITHHELD < order[i] < USED)))

    @rule()
    def copies(self) -> None:
        self.both("copies")

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(1, 63), token=st.integers(0, 1), times=st.integers(1, 3))
    def append(self, chosen: int, token: int, times: int) -> None:
        ready = [h for h in self.some(chosen) if self.computed[h] == self.known[h]] * times
        self.both("append", ints(*ready), np.full(len(ready), token, np.int32))
        for handle in ready:
            self.known[handle] += 1

    @precondition(lambda self: self.known)
    @rule(
        chosen=st.integers(0, 63),
        renew=st.booleans(),
        returns=st.sampled_from([False] * 3 + [True]),
    )
    def close(self, chosen: int, renew: bool, returns: bool) -> None:
        self.forget(self.one(chosen), renew, returns)

    @precondition(lambda self: self.known)
    @rule(chosen=st.integers(0, 63), until=st.integers(0, 60), chunk=st.integers(1, 9))
    def look(self, chosen: int, until: int, chunk: int) -> None:
        handle, others = self.one(chosen), self.some(chosen)
        self.both("largest", handle, until)
        self.both("held_pages", handle)
        lengths = ints(*(self.known[other] + 3 for other in others))
        self.both("fits", handle, until, chunk, ints(*others), lengths)

    @precondition(lambda self: self.past)
    @rule(
        chosen=st.integers(0, 99),
        more=st.sampled_from([[], [1], [0, 1] * 9, [1] * 90]),
        chunk=st.integers(1, 9),
    )
    def turn_away(self, chosen: int, more: list[int], chunk: int) -> None:
        tokens, root, options = self.past[chosen % len(self.past)]
        question = [*tokens, *more], root, options, chunk
        self.turned_away = None if self.fits(*question) else question

    def fits(self, tokens: list[int], root: str, options: dict[str, Any], chunk: int) -> bool:
        handle = self.both("open", ints(*tokens), root, **options)
        lengths = ints(*(known + 1 for known in self.known.values()))
        fits: bool = self.both("fits", handle, len(tokens), chunk, ints(*self.known), lengths)
        self.both("close", handle, renew=False)
        return fits

    @precondition(lambda self: self.turned_away is not None)
    @rule()
    def ask_again(self) -> None:
        """Who need not ask again would be turned away again."""
        if self.turned_away is not None and not self.both.cores[1].may_fit():
            assert not self.fits(*self.turned_away)

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "both"):
            self.both.check()

    def teardown(self) -> None:
        if not hasattr(self, "both"):
            return
        for handle in self.known:
            self.both("close", handle)
        self.both("begin_step", self.step + 3)
        state = self.both.check()
        assert not state.holders
        assert not any(state.used)


def filled(both: Pair, tokens: list[int], root: str = "") -> int:
    """A request whose whole prompt is computed."""
    handle: int = both("open", ints(*tokens), root)
    both("claim", handle, len(tokens))
    served, _ = both("grow", ints(handle), ints(len(tokens)))
    assert served == 1
    both("advance", ints(handle), ints(len(tokens)))
    return handle


def with_image(*tokens: int) -> dict[str, Any]:
    """One image over the negative ids, of three image tokens each."""
    places = [i for i, token in enumerate(tokens) if token < 0]
    return {"images": np.asarray([[places[0], len(places), 3 * len(places)]], np.int32)}


def shown(both: Pair, *tokens: int) -> int:
    handle: int = both("open", ints(*tokens), "", **with_image(*tokens))
    both("grow", ints(handle), ints(len(tokens)))
    both("advance", ints(handle), ints(len(tokens)))
    return handle


def clean(core: HoldingCore) -> bool:
    found = audit(core.layout, core.snapshot())
    assert found == []
    return True


def insert(core: HoldingCore, tokens: Sequence[int], computed: int) -> None:
    """Take in what somebody else has computed of a text."""
    handle = core.open(ints(*tokens), "", 9)
    core.receive(handle, computed)
    served, _ = core.grow(ints(handle), ints(computed))
    assert served == 1 and clean(core)
    core.advance(ints(handle), ints(computed))
    core.close(handle)
    assert clean(core)


def decoded(both: Pair, handles: list[int], lengths: dict[int, int], token: int) -> list[int]:
    """One token more for each; those that the pool had no room for are closed, and not returned."""
    who, until = ints(*handles), ints(*(lengths[h] + 1 for h in handles))
    both("append", who, np.full(len(handles), token, np.int32))
    served, _ = both("grow", who, until)
    for handle in handles[served:]:
        both("close", handle)
    both("advance", who[:served], until[:served])
    lengths.update(zip(handles[:served], until[:served].tolist(), strict=True))
    return handles[:served]
