"""Chunked-local attention (Llama 4 text): its chunks, and the positions its queries scale with."""

import pytest
import torch

from kvell.models.config.description import describe
from kvell.models.forward.true_positions import TruePositions, asks_a_cache
from kvell.models.loading.random_weights import random_module
from kvell.pages.layout import GroupKind
from tests.models.attention_variants import CHUNKED
from tests.models.harness import (
    assert_exact,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

NAME = "Llama4ForCausalLM"
CHUNK = 9


def test_chunked_layers_have_a_group_of_their_own() -> None:
    layers = describe(tiny_config(NAME), 4).layers
    assert [layer.kind for layer in layers] == [
        GroupKind.CHUNKED,
        GroupKind.FULL,
        GroupKind.CHUNKED,
    ]
    assert [layer.window_tokens for layer in layers] == [CHUNK, 0, CHUNK]


@pytest.mark.parametrize("split", [1, 8, 9, 10, 17, 18, 19])
def test_steps_that_end_around_the_edge_of_a_chunk(split: int) -> None:
    module, ids = tiny_module(NAME), prompt_ids(31)
    runner = runner_over(paged(module))
    parts = [runner.step([("a", ids[:split])]), runner.step([("a", ids[split:])])]
    assert_exact(torch.cat(parts), oracle_logits(module, ids))


def test_nothing_before_the_chunk_is_read() -> None:
    """With chunked layers alone, a changed token reaches the end of its chunk and no further."""
    config = tiny_config(NAME, layer_types=[CHUNKED] * 3, no_rope_layers=[1, 1, 1])
    model, ids = paged(random_module(config, seed=3)), prompt_ids(25)
    changed = [*ids[:4], ids[4] + 1 if ids[4] < 500 else 3, *ids[5:]]
    first, second = (runner_over(model).step([("a", tokens)]) for tokens in (ids, changed))
    moved = (first - second).abs().amax(1) > 1e-4 * first.abs().max()
    assert moved.tolist() == [4 <= position < CHUNK for position in range(25)]


def test_queries_scale_with_their_positions_in_any_order_of_steps() -> None:
    """Two requests decode at unlike positions in one row of tokens."""
    module, ids, other = tiny_module(NAME), prompt_ids(30), prompt_ids(17, seed=1)
    runner = runner_over(paged(module))
    runner.step([("a", ids[:25]), ("b", other[:3])])
    rows = runner.step([("b", other[3:]), ("a", ids[25:])])
    assert_exact(rows[:14], oracle_logits(module, other)[3:])
    assert_exact(rows[14:], oracle_logits(module, ids)[25:])


def test_the_scaling_matters_in_these_tests() -> None:
    tuned = tiny_module(NAME)
    plain = random_module(tiny_config(NAME, attn_temperature_tuning=False), seed=3)
    ids = prompt_ids(30)
    plain.load_state_dict(tuned.state_dict())
    difference = (oracle_logits(plain, ids) - oracle_logits(tuned, ids)).abs().max()
    assert difference > 1e-2 * oracle_logits(tuned, ids).abs().max()
    assert_exact(runner_over(paged(plain)).step([("a", ids)]), oracle_logits(plain, ids))


def test_only_models_that_ask_get_something_like_a_cache() -> None:
    assert asks_a_cache(tiny_module(NAME))
    assert not asks_a_cache(tiny_module("LlamaForCausalLM"))


def test_true_positions() -> None:
    positions = TruePositions(torch.tensor([7, 0, 1, 2, 40]))
    rows = torch.arange(5) + positions.get_seq_length(3)
    assert rows.tolist() == [7, 0, 1, 2, 40]
    key, value = torch.ones(1), torch.zeros(1)
    assert positions.update(key, value, 0) == (key, value)
