"""Layers that read an earlier layer's keys and values, and chunked-local attention."""

from typing import Any

import pytest
import torch

from kvell.models.config.description import describe
from kvell.models.forward.kv_memory import layer_pages, storing_layer
from kvell.models.forward.true_positions import TruePositions, asks_a_cache
from kvell.models.loading.random_weights import random_module
from kvell.pages.layout import GroupKind
from tests.models.attention_variants import CHUNKED, FULL, SHARES, SLIDING
from tests.models.harness import (
    PagedRunner,
    assert_exact,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    small_layout,
    tiny_config,
    tiny_module,
)

SOURCES = {"Gemma3nForCausalLM": {3: 1, 4: 2, 5: 1}, "Gemma4ForCausalLM": {4: 2, 5: 3}}
CHARACTER: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, SLIDING],
    "num_kv_shared_layers": 5,
    "num_key_value_heads": 1,
}
"""As Character.AI describes its own: one kv head, most layers windowed, few that store."""

every_family = pytest.mark.parametrize("architecture", sorted(SHARES))


@every_family
def test_sharing_layers_lie_where_their_source_lies(architecture: str) -> None:
    description = describe(tiny_config(architecture), 4)
    layout = small_layout(description)
    pool = torch.zeros(layout.pool_bytes, dtype=torch.uint8)
    pages = layer_pages(layout, description, pool, torch.float32)
    sources = SOURCES[architecture]
    assert {layer.index: layer.kv_of for layer in description.layers} == {
        index: sources.get(index) for index in range(6)
    }
    assert all(pages[index] is pages[source] for index, source in sources.items())
    assert len({id(place) for place in pages.values()}) == 6 - len(sources)
    assert [storing_layer(layer) for layer in description.layers] == [
        sources.get(index, index) for index in range(6)
    ]


@every_family
def test_sharing_layers_write_nothing(architecture: str) -> None:
    runner = runner_over(paged(tiny_module(architecture)))
    written: list[int] = []

    class Watch:
        def after_kv_write(self, _layer: int) -> None:
            written.append(int((runner.pool != 0xFF).sum()))

        def before_attend(self, _layer: int, _query: torch.Tensor) -> None: ...

        def after_attend(self, _layer: int, _output: torch.Tensor) -> None: ...

    runner.callbacks = Watch()
    runner.step([("a", prompt_ids(8))])
    grew = [now > before for before, now in zip([0, *written], written, strict=False)]
    assert grew == [index not in SOURCES[architecture] for index in range(6)]


@every_family
def test_sharing_layers_read_what_the_source_wrote(architecture: str) -> None:
    """Keys of the source that are changed between its attention and the sharing layer's."""
    ids = prompt_ids(9)
    sharing, source = min(SOURCES[architecture].items())

    def last_row(tamper: bool) -> torch.Tensor:
        runner = runner_over(paged(tiny_module(architecture)))

        class Tamper:
            def after_kv_write(self, layer: int) -> None:
                if tamper and layer == sharing:
                    scale_layer(runner, source)

            def before_attend(self, _layer: int, _query: torch.Tensor) -> None: ...

            def after_attend(self, _layer: int, _output: torch.Tensor) -> None: ...

        runner.callbacks = Tamper()
        return runner.step([("a", ids)])[-1]

    difference = (last_row(tamper=True) - last_row(tamper=False)).abs().max()
    assert difference > 1e-3 * last_row(tamper=False).abs().max()


def scale_layer(runner: PagedRunner, layer: int) -> None:
    """Turn around everything that a layer stored for request ``a``."""
    group = runner.layout.group_of_layer(layer)
    spec = runner.layout.groups[group]
    start = spec.layer_offset_bytes(layer)
    for page in runner.requests["a"].pages[group]:
        place = runner.page_bytes(group, page)[start : start + spec.layer_page_bytes]
        place.view(torch.float32).mul_(-3.0)


@every_family
def test_few_layers_that_store_among_windowed_ones(architecture: str) -> None:
    changes = CHARACTER | {"activation_sparsity_pattern": [0.0] * 8}
    if architecture == "Gemma4ForCausalLM":
        del changes["activation_sparsity_pattern"]
    module = random_module(tiny_config(architecture, **changes), seed=3)
    module.set_attn_implementation("eager")
    model, ids = paged(module), prompt_ids(40)
    stored = [layer.index for layer in model.description.layers if layer.kv_of is None]
    assert stored == [0, 1, 2]
    runner = runner_over(model)
    parts = [runner.step([("a", ids[i : i + 7])]) for i in range(0, 40, 7)]
    assert_exact(torch.cat(parts), oracle_logits(module, ids))


def test_without_sharing_every_layer_stores() -> None:
    config = tiny_config("Gemma3nForCausalLM", num_kv_shared_layers=0)
    assert {layer.kv_of for layer in describe(config, 4).layers} == {None}
    module = random_module(config, seed=3)
    module.set_attn_implementation("eager")
    ids = prompt_ids(20)
    assert_exact(runner_over(paged(module)).step([("a", ids)]), oracle_logits(module, ids))


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
