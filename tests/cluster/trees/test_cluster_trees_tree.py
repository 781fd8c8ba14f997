"""What a prompt tree answers, one thing at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvell.cluster.trees.chains import PromptChain, TreeGroup
from kvell.cluster.trees.tree import ASK_AGAIN_SECONDS, MOST_DEAD_BITS, PromptTree
from kvell.engine.protocol.notices import IndexedGroup
from kvell.memory import GroupKind
from tests.cluster.trees.naive_trees import (
    FULL,
    SLIDING,
    blocks_of,
    chain_of,
    naive_match,
    removed,
    stored,
    whole,
)

TEXT = list(range(1, 42))
CHAIN = chain_of(TEXT, [FULL])
BLOCKS = blocks_of(CHAIN, [FULL])
STATE = TreeGroup(GroupKind.STATE, 4)


def tree_of(*groups: TreeGroup, ttl: float = 100.0) -> PromptTree:
    return PromptTree(groups or (FULL,), ttl, guess_seconds=10.0)


def test_an_empty_tree_knows_nobody() -> None:
    assert tree_of().match(CHAIN, 0.0) == {}


def test_each_instance_has_its_own_length() -> None:
    tree = tree_of()
    for number in (1, 3, 10):
        assert tree.on_notice(f"mixed-{number}", 1, stored(0, BLOCKS[:number]), 0.0)
    assert tree.match(CHAIN, 0.0) == {"mixed-1": 4, "mixed-3": 12, "mixed-10": 40}
    assert tree.match(chain_of(TEXT[:13], [FULL]), 0.0) == {
        "mixed-1": 4,
        "mixed-3": 12,
        "mixed-10": 12,
    }


def test_a_whole_prompt_that_is_cached_leaves_one_token() -> None:
    tree = tree_of()
    tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
    assert tree.match(chain_of(TEXT[:8], [FULL]), 0.0) == {"mixed-0": 7}
    assert tree.match(chain_of(TEXT[:1], [FULL]), 0.0) == {}
    assert tree.match(chain_of([], [FULL]), 0.0) == {}


def test_a_hole_ends_a_prefix() -> None:
    tree = tree_of()
    tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
    tree.on_notice("mixed-0", 1, removed(1, BLOCKS[2:3]), 0.0)
    assert tree.match(CHAIN, 0.0) == {"mixed-0": 8}
    tree.on_notice("mixed-0", 1, removed(2, BLOCKS[:1]), 0.0)
    assert tree.match(CHAIN, 0.0) == {}


def test_a_removal_takes_only_its_own_instance() -> None:
    tree = tree_of()
    for name in ("mixed-0", "mixed-1"):
        tree.on_notice(name, 1, stored(0, BLOCKS), 0.0)
    tree.on_notice("mixed-0", 1, removed(1, BLOCKS[1:]), 0.0)
    assert tree.match(CHAIN, 0.0) == {"mixed-0": 4, "mixed-1": 40}
    tree.on_notice("mixed-0", 1, removed(2, BLOCKS[1:]), 0.0)  # again: nothing happens
    assert tree.match(CHAIN, 0.0) == {"mixed-0": 4, "mixed-1": 40}


class TestHybrids:
    def test_a_window_need_not_be_cached_before_it(self) -> None:
        groups = (FULL, SLIDING)
        tree, chain = tree_of(*groups), chain_of(TEXT, groups)
        full, sliding = (
            [one for one in blocks_of(chain, groups) if one[0] == index] for index in (0, 1)
        )
        tree.on_notice("mixed-0", 1, stored(0, full), 0.0)
        assert tree.match(chain, 0.0) == {}
        tree.on_notice("mixed-0", 1, stored(1, sliding[5:8]), 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 32}  # it reads tokens 23 … 31, from block 5 on
        tree.on_notice("mixed-0", 1, removed(2, full[7:]), 0.0)
        assert tree.match(chain, 0.0) == {}  # before 28 it would read from block 4 on

    def test_a_state_counts_where_it_is_and_only_there(self) -> None:
        groups = (STATE, FULL)
        tree, chain = tree_of(*groups), chain_of(TEXT, groups)
        blocks = blocks_of(chain, groups)
        states, full = blocks[:10], blocks[10:]
        tree.on_notice("mixed-0", 1, stored(0, [*full[:9], states[3], states[9]]), 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 16}
        tree.on_notice("mixed-0", 1, stored(1, full), 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 40}

    def test_where_a_chunk_ends_nothing_of_it_is_needed(self) -> None:
        groups = (FULL, TreeGroup(GroupKind.CHUNKED, 4, 16))
        tree, chain = tree_of(*groups), chain_of(TEXT, groups)
        blocks = blocks_of(chain, groups)
        tree.on_notice("mixed-0", 1, stored(0, blocks[:6]), 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 16}
        tree.on_notice("mixed-0", 1, stored(1, [blocks[14]]), 0.0)  # tokens 16 … 19
        assert tree.match(chain, 0.0) == {"mixed-0": 20}

    def test_a_prefix_of_two_instances_together_is_nobodys(self) -> None:
        groups = (STATE, FULL)
        tree, chain = tree_of(*groups), chain_of(TEXT, groups)
        blocks = blocks_of(chain, groups)
        tree.on_notice("mixed-0", 1, stored(0, blocks[:10]), 0.0)
        tree.on_notice("mixed-1", 1, stored(0, blocks[10:]), 0.0)
        assert tree.match(chain, 0.0) == {}

    def test_other_models_and_salts_are_other_prompts(self) -> None:
        groups = (FULL, TreeGroup(GroupKind.FULL, 4, model="other"))
        tree, tokens = tree_of(*groups), np.asarray(TEXT, np.int32)
        other = PromptChain.of(tokens, groups, "other")
        tree.on_notice("mixed-0", 1, stored(0, [(1, one) for one in other.hashes[4]]), 0.0)
        assert tree.match(other, 0.0) == {"mixed-0": 40}
        assert tree.match(PromptChain.of(tokens, groups), 0.0) == {}
        assert tree.match(PromptChain.of(tokens, groups, "other", "salt"), 0.0) == {}
        assert tree.match(PromptChain.of(tokens, groups, "third"), 0.0) == {}


class TestNotices:
    def test_a_missing_one_is_found_and_what_is_known_serves_until_all_is_told(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS[:2]), 0.0)
        assert not tree.on_notice("mixed-0", 1, stored(2, BLOCKS[2:4]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 16}
        assert tree.on_notice("mixed-0", 1, stored(3, BLOCKS[4:]), 0.0)  # it is asked already
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 40}
        assert tree.on_notice("mixed-0", 1, whole(4, BLOCKS[:3]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 12}
        assert tree.on_notice("mixed-0", 1, stored(5, BLOCKS[3:4]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 16}

    def test_who_does_not_tell_all_is_asked_again_after_a_while(self) -> None:
        tree = tree_of()
        told = [
            tree.on_notice("mixed-0", 1, stored(2 * at, []), at * ASK_AGAIN_SECONDS / 2)
            for at in range(1, 6)
        ]
        assert told == [False, True, False, True, False]

    def test_what_comes_twice_counts_once(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
        assert tree.on_notice("mixed-0", 1, removed(1, BLOCKS[1:]), 0.0)
        assert tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 4}

    def test_a_whole_one_replaces_what_was_known(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
        tree.on_notice("mixed-0", 1, whole(7, BLOCKS[:2]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 8}

    def test_a_new_incarnation_has_nothing(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
        assert tree.on_notice("mixed-0", 2, stored(0, BLOCKS[:1]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 4}
        assert tree.on_notice("mixed-0", 1, stored(1, BLOCKS), 0.0)  # it comes late
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 4}
        assert not tree.on_notice("mixed-0", 3, stored(1, BLOCKS[:2]), 0.0)  # number 0 is missing
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 8}

    def test_a_lost_instance_has_nothing_at_once(self) -> None:
        tree = tree_of()
        for name in ("mixed-0", "mixed-1"):
            tree.on_notice(name, 1, stored(0, BLOCKS), 0.0)
            tree.expect(name, 1, chain_of(range(50, 70), [FULL]), 0.0)
        tree.lost("mixed-0")
        tree.lost("mixed-7")  # nobody knows it
        assert tree.match(CHAIN, 0.0) == {"mixed-1": 40}
        assert tree.match(chain_of(range(50, 70), [FULL]), 0.0) == {"mixed-1": 19}

    def test_groups_that_are_not_told_are_no_obstacle(self) -> None:
        groups = (FULL, TreeGroup(GroupKind.CROSS, 0, required=False))
        tree = tree_of(*groups)
        tree.on_notice("mixed-0", 1, stored(0, [*BLOCKS, (1, 5), (9, 5)]), 0.0)
        assert tree.match(chain_of(TEXT, groups), 0.0) == {"mixed-0": 40}
        assert len(tree) == len(BLOCKS)


class TestGuesses:
    def test_a_guess_counts_until_its_time_is_over(self) -> None:
        tree = tree_of()
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        assert tree.match(CHAIN, 4.0) == {"mixed-0": 40}
        assert tree.match(CHAIN, 11.0) == {} and tree.guesses == 0

    def test_another_guess_does_not_prolong_the_first(self) -> None:
        tree = tree_of()
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        for second in range(1, 12):
            tree.expect("mixed-1", 1, CHAIN, float(second))
        assert tree.match(CHAIN, 11.0) == {"mixed-1": 40}

    def test_a_guess_that_came_true_lasts(self) -> None:
        tree = tree_of()
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS[:5]), 1.0)
        assert tree.guesses == len(BLOCKS) - 5
        assert tree.match(CHAIN, 2.0) == {"mixed-0": 40}
        assert tree.match(CHAIN, 20.0) == {"mixed-0": 20}

    def test_a_removal_ends_a_guess(self) -> None:
        tree = tree_of()
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        tree.on_notice("mixed-0", 1, removed(0, BLOCKS[2:3]), 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 8}

    def test_what_is_cached_is_not_guessed(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS[:8]), 0.0)
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        assert tree.guesses == 2
        tree.on_notice("mixed-0", 1, removed(1, BLOCKS[:8]), 0.0)
        assert tree.match(CHAIN, 0.0) == {}

    def test_who_died_since_is_not_expected_to_have_it(self) -> None:
        tree = tree_of()
        tree.on_notice("mixed-0", 2, stored(0, []), 0.0)
        tree.expect("mixed-0", 1, CHAIN, 0.0)
        assert tree.match(CHAIN, 0.0) == {}
        tree.expect("mixed-0", 3, CHAIN, 0.0)
        assert tree.match(CHAIN, 0.0) == {"mixed-0": 40}

    def test_a_hybrid_is_expected_to_keep_the_state_near_its_end(self) -> None:
        groups, text = (FULL, STATE), list(range(1300))
        tree, chain = tree_of(*groups), chain_of(text, groups)
        tree.expect("mixed-0", 1, chain, 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 1024}  # as eviction.checkpoints has it


class TestForgetting:
    def test_what_nobody_renews_is_forgotten_and_what_is_asked_for_stays(self) -> None:
        tree = tree_of(ttl=10.0)
        other = chain_of(range(50, 70), [FULL])
        tree.on_notice("mixed-0", 1, stored(0, [*BLOCKS, *blocks_of(other, [FULL])]), 0.0)
        for second in range(0, 60, 5):
            assert tree.match(CHAIN, float(second)) == {"mixed-0": 40}
        assert len(tree) == len(BLOCKS)
        assert tree.match(other, 60.0) == {}
        assert tree.audit() == []

    @given(st.lists(st.floats(0.1, 9.9), max_size=12))
    def test_nothing_is_forgotten_within_its_time(self, pauses: list[float]) -> None:
        tree, now = tree_of(ttl=10.0), 0.0
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS), now)
        for pause in pauses:
            now += pause
            assert tree.match(CHAIN, now) == {"mixed-0": 40}

    def test_memory_is_bounded(self) -> None:
        tree = PromptTree([FULL], 1e9, most_blocks=100)
        for sequence in range(80):
            prompt = chain_of(range(sequence * 100, sequence * 100 + 40), [FULL])
            tree.on_notice("mixed-0", 1, stored(sequence, blocks_of(prompt, [FULL])), 0.0)
            assert len(tree) <= 120
            assert tree.match(prompt, 0.0) == {"mixed-0": 39}

    def test_bits_are_used_again(self) -> None:
        """However often instances die, sets of instances stay small, and nobody inherits."""
        tree = tree_of()
        for incarnation in range(1, 5 * MOST_DEAD_BITS):
            now = incarnation / 10
            assert tree.on_notice("mixed-0", incarnation, stored(0, BLOCKS[:3]), now)
            tree.expect("mixed-1", incarnation, CHAIN, now)
            assert tree.match(CHAIN, now) == {"mixed-0": 12, "mixed-1": 40}
            assert tree.audit() == []
        assert max(
            bits for one in tree._blocks.values() for _, bits in one.items()
        ).bit_length() < (MOST_DEAD_BITS + 8)

    def test_bits_are_used_again_after_a_while(self) -> None:
        """What lives on by being asked for does not keep the dead."""
        tree = tree_of(ttl=10.0)
        tree.on_notice("mixed-0", 1, stored(0, BLOCKS), 0.0)
        for number in range(1, 30):
            now = number * 10.0
            tree.on_notice(f"other-{number}", 1, stored(0, BLOCKS[:3]), now)
            assert tree.match(CHAIN, now) == {"mixed-0": 40, f"other-{number}": 12}
            tree.lost(f"other-{number}")
            assert tree.match(CHAIN, now) == {"mixed-0": 40}
            assert tree.audit() == []
        assert tree._members.dead.bit_count() <= 3


def test_a_thousand_instances_are_told_apart() -> None:
    tree = tree_of()
    held = {f"mixed-{n}": set(BLOCKS[: n % 11]) for n in range(1000)}
    for name, blocks in held.items():
        tree.on_notice(name, 1, stored(0, sorted(blocks, key=BLOCKS.index)), 0.0)
    assert tree.match(CHAIN, 0.0) == naive_match(CHAIN, [FULL], held)
    for number in range(0, 1000, 3):
        tree.lost(f"mixed-{number}")
        del held[f"mixed-{number}"]
    assert tree.match(CHAIN, 0.0) == naive_match(CHAIN, [FULL], held)
    assert tree.audit() == []


@pytest.mark.parametrize(("size", "required"), [(16, True), (0, False)])
def test_groups_come_from_what_an_instance_says_of_itself(size: int, required: bool) -> None:
    told = IndexedGroup("sliding", size, 128, "m")
    assert TreeGroup.of(told) == TreeGroup(GroupKind.SLIDING, size, 128, "m", required=required)


def test_a_chain_has_only_the_sizes_of_its_model() -> None:
    groups = (FULL, TreeGroup(GroupKind.FULL, 6), TreeGroup(GroupKind.FULL, 5, model="other"))
    chain = chain_of(TEXT, groups)
    assert {size: len(hashes) for size, hashes in chain.hashes.items()} == {4: 10, 6: 6}
    assert chain.alignment_tokens == 12 and chain.limit_tokens == 40
