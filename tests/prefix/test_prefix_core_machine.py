"""The whole memory core under random use, with the audit after every step."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvell.pages.audit import audit
from kvell.pages.layout import LayerSpec, Layout
from kvell.pages.sizing import MANAGERS, Manager, plan_layout
from kvell.prefix.core import ReferenceCore
from tests.pages.pools import Chunk, kind_of

PAGE_TOKENS = 4


def small_layout(
    windows: list[int], sizes: list[int], num_large: int, manager: Manager = "kvell"
) -> Layout:
    """Groups with these windows (0: full) and KV heads, in a pool of so many large pages."""
    layers = [
        LayerSpec(i, kind_of(w), size, 8, 2, int(w))
        for i, (w, size) in enumerate(zip(windows, sizes, strict=True))
    ]
    wide = plan_layout(layers, 1 << 20, page_tokens=PAGE_TOKENS, manager=manager)
    pool_bytes = wide.large_page_bytes * num_large
    return plan_layout(layers, pool_bytes, page_tokens=PAGE_TOKENS, manager=manager)


def prompt_of(bits: int, repeats: int, tail: int) -> list[int]:
    """Up to 50 tokens of a two-letter alphabet: long common beginnings, odd ends."""
    head = [bits >> i & 1 for i in range(6)]
    return (
        head[: 1 + bits % 6] + [1, 0, 1] * (3 * repeats) + [tail >> i & 1 for i in range(tail % 5)]
    )


class CoreMachine(RuleBasedStateMachine):
    """Requests come, grow, advance, and go; prefixes collide by design."""

    @initialize(
        shape=st.sampled_from(
            [
                ([0], [1]),
                ([6], [2]),
                ([0, 6], [1, 3]),
                ([0, 9], [3, 1]),
                ([0, 5, 14], [1, 2, 3]),
                ([Chunk(8)], [2]),
                ([0, Chunk(12)], [1, 3]),
                ([0, 5, Chunk(10)], [1, 2, 3]),
            ]
        ),
        num_large=st.integers(3, 14),
        manager=st.sampled_from(MANAGERS),
    )
    def start(self, shape: tuple[list[int], list[int]], num_large: int, manager: Manager) -> None:
        self.layout = small_layout(*shape, num_large, manager)
        self.core = ReferenceCore(self.layout)
        self.step = 0
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.leases: dict[int, int] = {}
        self.published: set[tuple[int, ...]] = set()

    def pick(self, index: int) -> int:
        handles = sorted(self.tokens)
        return handles[index % len(handles)]

    @rule()
    def next_step(self) -> None:
        self.step += 1
        self.core.begin_step(self.step)
        for handle in [h for h, until in self.leases.items() if until < self.step]:
            del self.leases[handle]

    @rule(
        shape=st.tuples(st.integers(0, 63), st.integers(0, 5), st.integers(0, 15)),
        extra=st.integers(0, 12),
        root=st.sampled_from(["", "salt"]),
        lease=st.booleans(),
    )
    def open(self, shape: tuple[int, int, int], extra: int, root: str, lease: bool) -> None:
        tokens = prompt_of(*shape)
        prompt = np.asarray(tokens, np.int32)
        expected = self.core.peek(prompt, root)
        handle = self.core.open(prompt, root, self.step + 2 if lease else None)
        hit = self.core.hit_tokens(handle)
        assert hit == expected
        assert hit < len(tokens)
        assert hit % PAGE_TOKENS == 0
        assert hit == 0 or (root, *tokens[:hit]) in self.published
        if lease and extra % 2:
            self.leases[handle] = self.step + 2
            return
        self.core.claim(handle, len(tokens) + extra)
        self.tokens[handle], self.computed[handle] = tokens, hit
        self.root = getattr(self, "root", {})
        self.root[handle] = root
        self.reach(handle, len(tokens))

    def reach(self, handle: int, wanted: int) -> None:
        """Compute as much of the request as memory allows, up to ``wanted`` tokens."""
        until = self.core.largest(handle, wanted)
        assert self.computed[handle] <= until <= wanted
        one = np.asarray([handle], np.int32)
        served, rows = self.core.grow(one, np.asarray([until], np.int32))
        assert served == 1
        assert len({tuple(row) for row in rows.tolist()}) == len(rows)
        if until < wanted:
            assert self.core.grow(one, np.asarray([until + 1], np.int32))[0] == 0
        self.finish_tokens(handle, until)

    @precondition(lambda self: self.tokens)
    @rule(index=st.integers(0, 99), count=st.integers(1, 20))
    def prefill(self, index: int, count: int) -> None:
        handle = self.pick(index)
        self.reach(handle, min(len(self.tokens[handle]), self.computed[handle] + count))

    def finish_tokens(self, handle: int, until: int) -> None:
        self.core.advance(np.asarray([handle], np.int32), np.asarray([until], np.int32))
        self.computed[handle] = until
        for length in range(PAGE_TOKENS, until + 1, PAGE_TOKENS):
            self.published.add((self.root[handle], *self.tokens[handle][:length]))

    @precondition(lambda self: self.tokens)
    @rule(token=st.integers(0, 1))
    def decode_all(self, token: int) -> None:
        ready = [h for h in sorted(self.tokens) if self.computed[h] == len(self.tokens[h])]
        handles = np.asarray(ready, np.int32)
        self.core.append(handles, np.full(len(ready), token, np.int32))
        for handle in ready:
            self.tokens[handle] = [*self.tokens[handle], token]
        until = np.asarray([len(self.tokens[h]) for h in ready], np.int32)
        served, rows = self.core.grow(handles, until)
        assert served <= len(ready)
        assert (rows[:, 0] < max(served, 1)).all()
        for handle in ready[:served]:
            self.finish_tokens(handle, len(self.tokens[handle]))

    @precondition(lambda self: self.tokens)
    @rule(index=st.integers(0, 99), renew=st.booleans())
    def close(self, index: int, renew: bool) -> None:
        handle = self.pick(index)
        self.core.close(handle, renew=renew)
        del self.tokens[handle], self.computed[handle]

    @invariant()
    def audited(self) -> None:
        if hasattr(self, "core"):
            assert audit(self.layout, self.core.snapshot()) == []

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for handle in list(self.tokens):
            self.core.close(handle)
        self.step += 4
        self.core.begin_step(self.step)
        state = self.core.snapshot()
        assert not any(state.used)
        assert not state.holders
        assert audit(self.layout, state) == []


FEW = settings(
    max_examples=200,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=3000, stateful_step_count=60)

TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = FEW


class LongCoreMachine(CoreMachine):
    """The same for minutes."""


TestCoreMachineLong = pytest.mark.long(LongCoreMachine.TestCase)
TestCoreMachineLong.settings = MANY
