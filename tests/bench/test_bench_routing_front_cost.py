"""What routing costs the front: the bench drives the real thing, and its instances behave."""

from collections.abc import Sequence

import numpy as np
import pytest

from bench.routing.front_cost import (
    BLOCK_TOKENS,
    LAYOUTS,
    STATE_TOKENS,
    Instance,
    block_bytes,
    measured,
    prompts_of,
)
from kvell.cluster.trees.chains import PromptChain, TreeGroup
from kvell.cluster.trees.tree import PromptTree

PARTS = ("hash", "match", "choose", "pull", "expect", "decode", "notice")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["prompt-tree", "longest-prefix"])
def test_sessions_find_what_they_left(layout: str, policy: str) -> None:
    figures = measured(policy, LAYOUTS[layout], 3, 2000, 40)
    assert 0.5 < figures["hit_share"] <= 0.8
    assert figures["total_us"] == pytest.approx(sum(figures[f"{part}_us"] for part in PARTS))
    assert figures["core_share"] == pytest.approx(figures["total_us"] * 1e-3)
    assert figures["median_us"] <= figures["p99_us"] <= figures["longest_us"]
    assert figures["blocks"] > 2000 / BLOCK_TOKENS and figures["notice_bytes"] > 100


def test_a_block_takes_more_than_its_key_and_less_than_a_page() -> None:
    assert 40 < block_bytes(LAYOUTS["full"], 10, 20) < 400


def test_prompts_share_a_beginning_and_more_within_a_session() -> None:
    prompts = list(prompts_of(1000, 2, 12))
    beginnings = {tuple(one[:100].tolist()) for one in prompts}
    sessions = {tuple(one[:800].tolist()) for one in prompts}
    assert (len(beginnings), len(sessions)) == (1, 2)
    assert len({tuple(one.tolist()) for one in prompts}) == 12
    assert {len(one) for one in prompts} == {1000}


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_an_instance_tells_what_it_caches(groups: Sequence[TreeGroup]) -> None:
    one = Instance("mixed-0", room_blocks=3 * 2048 // BLOCK_TOKENS)
    tree, tokens = PromptTree(groups), np.arange(2049, dtype=np.int32)
    for number in range(6):
        chain = PromptChain.of(tokens + number * 3000, groups)
        assert tree.on_notice("mixed-0", 1, one.stores(chain, groups), 0.0)
        assert tree.match(chain, 0.0) == {"mixed-0": 2048}
    assert 2048 % STATE_TOKENS == 0
    assert len(tree) == sum(map(len, one.cached.values()))
    assert tree.match(PromptChain.of(tokens, groups), 0.0) == {}  # it was evicted
