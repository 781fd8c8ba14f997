"""Layers that read an earlier layer's keys and values (Gemma 3n, Gemma 4): one place for both."""

from typing import Any

import pytest
import torch

from kvell.models.config.description import describe
from kvell.models.forward.kv_memory import layer_pages, storing_layer
from kvell.models.loading.random_weights import random_module
from tests.models.attention_variants import FULL, SHARES, SLIDING
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
