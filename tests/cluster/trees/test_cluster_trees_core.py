"""A prompt tree knows of a real memory core what the core itself would answer."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.trees.chains import PromptChain, TreeGroup
from kvell.cluster.trees.tree import PromptTree
from kvell.engine.core.index_watch import IndexWatch
from kvell.engine.protocol.messages import Event
from kvell.engine.protocol.notices import IndexNotice
from kvell.memory import GroupKind, LayerSpec, Layout, plan_layout
from tests.engine.core.watched_core import WatchedCore

PAGE_TOKENS = 4


def layout_of(kinds: Sequence[tuple[GroupKind, int]], num_large: int) -> Layout:
    layers = [
        LayerSpec(index, kind, 0, 0, 2, state_bytes=64)
        if kind is GroupKind.STATE
        else LayerSpec(index, kind, 1 + index, 8, 2, window)
        for index, (kind, window) in enumerate(kinds)
    ]
    large = plan_layout(layers, 1 << 24, page_tokens=PAGE_TOKENS).large_page_bytes
    return plan_layout(layers, large * num_large, page_tokens=PAGE_TOKENS)


FULL = (GroupKind.FULL, 0)
STATE = (GroupKind.STATE, 0)
LAYOUTS = {
    "full": layout_of([FULL], 60),
    "sliding hybrid": layout_of([FULL, (GroupKind.SLIDING, 9), (GroupKind.SLIDING, 30)], 60),
    "chunked hybrid": layout_of([(GroupKind.CHUNKED, 32), FULL], 60),
    "state hybrid": layout_of([FULL, STATE, STATE], 90),
    "all kinds": layout_of([FULL, (GroupKind.SLIDING, 14), STATE], 90),
}


def tree_groups(layout: Layout) -> list[TreeGroup]:
    """As an instance would name them."""
    sizes = [g.page_tokens for g in layout.groups if g.kind.counts_tokens]
    return [
        TreeGroup(
            group.kind,
            min(sizes) if group.kind is GroupKind.STATE else group.page_tokens,
            group.window_tokens,
        )
        for group in layout.groups
    ]


class Followed:
    """An engine's core beside a tree that hears its notices alone."""

    def __init__(self, layout: Layout) -> None:
        self.watched = WatchedCore.over(layout)
        memory = self.watched.memory
        self.watched.core.watch_index(lambda: IndexWatch(memory))
        self.groups = tree_groups(layout)
        self.tree = PromptTree(self.groups)
        self.submitted = 0

    def submit(self, prompt: Sequence[int]) -> None:
        self.watched.submit(f"r{self.submitted}", prompt)
        self.submitted += 1

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, IndexNotice):
                assert self.tree.on_notice("mixed-0", 1, event, 0.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.watched.core.has_work:
                self.hear(self.watched.step())

    def compare(self, prompt: Sequence[int]) -> int:
        """Blocks tell lengths of whole blocks, and those that end inside one that is whole."""
        tokens = np.asarray(prompt, np.int32)
        found = self.tree.match(PromptChain.of(tokens, self.groups), 0.0).get("mixed-0", 0)
        peek = self.watched.memory.peek
        step = math.lcm(*(group.block_tokens for group in self.groups))
        whole = (
            length
            for length in range((len(tokens) - 1) // step * step, 0, -step)
            if peek(tokens[: length + 1], "") == length
        )
        assert next(whole, 0) <= found <= peek(tokens, "")
        assert found % step == 0 or found == len(tokens) - 1
        return found


texts = st.builds(
    lambda start, count, branch, tail: [start, *range(10, 10 + count), *[branch] * tail],
    st.integers(1, 2),
    st.integers(0, 170),
    st.integers(3, 5),
    st.integers(0, 90),
)
stories = st.lists(st.tuples(texts, st.integers(0, 6)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", LAYOUTS)
@given(story=stories)
def test_a_tree_answers_as_the_core_would(name: str, story: list[tuple[list[int], int]]) -> None:
    followed = Followed(LAYOUTS[name])
    asked = [prompt for prompt, _ in story]
    for prompt, steps in story:
        followed.submit(prompt)
        followed.run(steps)
        for one in asked:
            followed.compare(one)
            followed.compare([*one, 9])
    followed.run(1000)
    for one in asked:
        followed.compare([*one, 9, 9])
    assert followed.tree.audit() == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_prefixes_are_found_in_every_layout(name: str) -> None:
    """The comparison is not one of nothing with nothing: here most of a prompt is found, and then
    it is evicted."""
    followed = Followed(LAYOUTS[name])
    prompt = list(range(10, 210))
    followed.submit(prompt)
    followed.run(1000)
    assert followed.compare([*prompt, 9]) >= 128
    for number in range(1, 30):
        followed.submit([number, *range(300, 300 + 190)])
        followed.run(1000)
        followed.compare([*prompt, 9])
    assert followed.compare([*prompt, 9]) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_after_a_lost_notice_an_instance_tells_all_again(name: str) -> None:
    followed = Followed(LAYOUTS[name])
    prompt, core = list(range(10, 210)), followed.watched.core
    followed.submit(prompt)
    lost = [event for event in followed.watched.step() if isinstance(event, IndexNotice)]
    assert lost
    late = [event for event in followed.watched.step() if isinstance(event, IndexNotice)]
    assert not followed.tree.on_notice("mixed-0", 1, late[0], 0.0)
    followed.run(1000)
    assert followed.tree.match(PromptChain.of(np.asarray(prompt), followed.groups), 0.0) == {}
    memory = followed.watched.memory
    followed.hear(core.watch_index(lambda: IndexWatch(memory)))
    assert followed.compare([*prompt, 9]) >= 128
