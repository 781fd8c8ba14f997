"""Instances cache, evict, crash and restart while their notices come late or not at all: the tree
knows what it was told, and after a whole notice what is true."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvell.cluster.trees.chains import TreeGroup
from kvell.cluster.trees.tree import ASK_AGAIN_SECONDS, PromptTree
from kvell.engine.protocol.notices import BlocksRemoved, IndexNotice
from tests import depth
from tests.cluster.trees.naive_trees import (
    GROUPS,
    Block,
    blocks_of,
    chain_of,
    naive_match,
    removed,
    stored,
    whole,
)

NAMES = ("mixed-0", "mixed-1", "mixed-2")
GUESS_SECONDS = 8.0
PROMPTS = [
    list(range(1, 14)),
    [*range(1, 9), *range(30, 40)],
    [*range(1, 21)],
    [7] * 12,
    [1, 2, 3],
]
names = st.sampled_from(NAMES)
prompts = st.sampled_from(PROMPTS)
shares = st.lists(st.booleans(), min_size=40, max_size=40)


@dataclass
class Instance:
    """An instance's index, and its notices on their way."""

    incarnation: int = 1
    cached: set[Block] = field(default_factory=set)
    sequence: int = 0
    notices: deque[tuple[int, IndexNotice]] = field(default_factory=deque)

    def tell(self, notice: IndexNotice) -> None:
        self.notices.append((self.incarnation, notice))
        self.sequence += 1


@dataclass
class Told:
    """What the tree was told of an instance, by its own rules."""

    incarnation: int
    held: set[Block] = field(default_factory=set)
    next_sequence: int = 0
    asks_again_seconds: float | None = None
    guesses: dict[Block, float] = field(default_factory=dict)


class Trees(RuleBasedStateMachine):
    groups: Sequence[TreeGroup] = GROUPS[0]

    def __init__(self) -> None:
        super().__init__()
        self.tree = PromptTree(self.groups, 1e9, guess_seconds=GUESS_SECONDS)
        self.instances = {name: Instance() for name in NAMES}
        self.told: dict[str, Told] = {}
        self.now = 100.0

    @initialize(name=names, prompt=prompts)
    def begins(self, name: str, prompt: list[int]) -> None:
        self.caches(name, prompt, [True] * 40)

    @rule(name=names, prompt=prompts, share=shares)
    def caches(self, name: str, prompt: list[int], share: list[bool]) -> None:
        one = self.instances[name]
        blocks = blocks_of(chain_of(prompt, self.groups), self.groups)
        new = [b for b, taken in zip(blocks, share, strict=False) if taken and b not in one.cached]
        if new:
            one.cached |= set(new)
            one.tell(stored(one.sequence, new))

    @rule(name=names, share=shares)
    def evicts(self, name: str, share: list[bool]) -> None:
        one = self.instances[name]
        old = [b for b, gone in zip(sorted(one.cached), share, strict=False) if gone]
        if old:
            one.cached -= set(old)
            one.tell(removed(one.sequence, old))

    @rule(name=names, count=st.integers(1, 4), loses_answer=st.booleans())
    def hears(self, name: str, count: int, loses_answer: bool = False) -> None:
        one = self.instances[name]
        for _ in range(min(count, len(one.notices))):
            incarnation, notice = one.notices.popleft()
            complete = self.tree.on_notice(name, incarnation, notice, self.now)
            assert complete == self.follow(name, incarnation, notice)
            if not complete and not loses_answer:
                one.tell(whole(one.sequence, one.cached))

    @rule(name=names)
    def loses_a_notice(self, name: str) -> None:
        one = self.instances[name]
        self.caches(name, PROMPTS[2], [True] * 40)
        if one.notices:
            one.notices.popleft()

    @rule(name=names)
    def tells_all_again(self, name: str) -> None:
        one = self.instances[name]
        one.tell(whole(one.sequence, one.cached))

    @rule(name=names, is_seen=st.booleans())
    def restarts(self, name: str, is_seen: bool) -> None:
        """Notices of the old incarnation may still come."""
        one = self.instances[name]
        one.incarnation, one.sequence = one.incarnation + 1, 0
        one.cached.clear()
        if is_seen:
            one.notices.clear()
            self.tree.lost(name)
            self.told.pop(name, None)

    @rule(name=names, prompt=prompts, age=st.sampled_from([0, 0, 0, 1]), is_asked=st.booleans())
    def expects(self, name: str, prompt: list[int], age: int, is_asked: bool) -> None:
        chain = chain_of(prompt, self.groups)
        if is_asked:
            self.tree.match(chain, self.now)
        incarnation = self.instances[name].incarnation - age
        self.tree.expect(name, incarnation, chain, self.now)
        told = self.joined(name, incarnation)
        if incarnation == told.incarnation:
            guessed = set(self.expected(prompt))
            told.guesses |= dict.fromkeys(guessed - told.held, self.now)

    def expected(self, prompt: list[int]) -> list[Block]:
        """Of states only one near the end, which these prompts are too short to have."""
        blocks = blocks_of(chain_of(prompt, self.groups), self.groups)
        return [one for one in blocks if self.groups[one[0]].kind.counts_tokens]

    @rule(seconds=st.sampled_from([1.0, GUESS_SECONDS / 2, 2 * GUESS_SECONDS, ASK_AGAIN_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def all_is_heard(self) -> None:
        for name, one in self.instances.items():
            self.tells_all_again(name)
            self.hears(name, len(one.notices))
            self.hears(name, len(one.notices))
            assert not one.notices
            assert self.told[name].held == one.cached

    @invariant()
    def matches(self) -> None:
        for prompt in PROMPTS:
            chain = chain_of(prompt, self.groups)
            sure = {name: one.held | self.young(one, 0.5) for name, one in self.told.items()}
            maybe = {name: one.held | self.young(one, 1.5) for name, one in self.told.items()}
            least = naive_match(chain, self.groups, sure)
            most = naive_match(chain, self.groups, maybe)
            found = self.tree.match(chain, self.now)
            assert set(least) <= set(found) <= set(most)
            assert all(least.get(one, 0) <= found[one] <= most[one] for one in found)
            assert all(0 < length < len(prompt) for length in found.values())
        assert self.tree.audit() == []

    def young(self, told: Told, part: float) -> set[Block]:
        """Guesses that are not older than this part of their time."""
        oldest = self.now - part * GUESS_SECONDS
        return {block for block, since in told.guesses.items() if since > oldest}

    def joined(self, name: str, incarnation: int) -> Told:
        told = self.told.get(name)
        if told is None or incarnation > told.incarnation:
            told = self.told[name] = Told(incarnation)
        return told

    def follow(self, name: str, incarnation: int, notice: IndexNotice) -> bool:
        told = self.joined(name, incarnation)
        if incarnation < told.incarnation:
            return True
        if notice.sequence < told.next_sequence:
            return True
        if notice.is_whole:
            told = self.told[name] = Told(incarnation)
        elif notice.sequence > told.next_sequence and told.asks_again_seconds is None:
            told.asks_again_seconds = self.now
        told.next_sequence = notice.sequence + 1
        for change in notice.changes:
            blocks = {(change.group, one) for one in change.hashes}
            if isinstance(change, BlocksRemoved):
                told.held -= blocks
            else:
                told.held |= blocks
            for block in blocks:
                told.guesses.pop(block, None)
        if told.asks_again_seconds is None or self.now < told.asks_again_seconds:
            return True
        told.asks_again_seconds = self.now + ASK_AGAIN_SECONDS
        return False


@pytest.mark.hypothesis
@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: "+".join(one.kind for one in groups))
def test_a_tree_knows_what_it_was_told(groups: tuple[TreeGroup, ...]) -> None:
    machine = type("Machine", (Trees,), {"groups": groups})
    run_state_machine_as_test(machine, settings=depth.machine(30, 0.2))
