"""Two sides of one bench: the same memory, the same answers."""

import pytest

from bench.elastic.in_turn import alternated
from bench.elastic.narrow_models import SHAPES, narrow_config
from bench.elastic.served import MAX_NUM_SEQS, Load, SideRun, lines, options_of
from bench.replay.shapes import read_shape
from kvell.models.config.description import describe
from tests.engine.setup.shared_pool import wide_module
from tests.models.fused_models import fused_model

LOAD = Load(prompt_tokens=300, output_tokens=6, requests=3, fits=60.0)


def test_both_sides_have_the_same_memory_and_the_same_largest_step() -> None:
    model = fused_model(wide_module())
    static, elastic = options_of(model, LOAD)
    reserve_bytes = model.activations.need_bytes(LOAD.prompt_tokens, MAX_NUM_SEQS)
    assert static.kv_memory_bytes is not None and elastic.memory_bytes is not None
    assert static.kv_memory_bytes + reserve_bytes == elastic.memory_bytes - model.weight_bytes
    assert static.max_num_batched_tokens == elastic.max_num_batched_tokens == 300


def test_both_sides_answer_alike_and_say_what_they_did() -> None:
    models = [fused_model(wide_module()), fused_model(wide_module())]
    chosen = zip(("static", "elastic"), models, options_of(models[0], LOAD), strict=True)
    sides = [SideRun(side, model, options, LOAD) for side, model, options in chosen]
    alternated(sides)
    assert not any(side.has_work for side in sides)
    assert sides[0].answers == sides[1].answers
    assert {len(tokens) for tokens in sides[0].answers.values()} == {6}
    figures = [side.figures() for side in sides]
    assert figures[0].reserve_mib > 0 and figures[1].reserve_mib == 0
    assert figures[1].chunks_mapped > 0
    assert all(1 <= side.batch_decoding <= 3 for side in figures)
    told = lines("wide", LOAD, figures)
    assert "3 requests of 300 + 6 tokens" in told[0] and len(told) == 3


def test_a_narrow_shape_keeps_the_layers_of_its_model() -> None:
    config = narrow_config("ministral-8b")
    assert (config.num_hidden_layers, config.num_key_value_heads) == (36, 1)
    assert (config.hidden_size, config.head_dim, config.sliding_window) == (512, 128, 2048)


@pytest.mark.parametrize("name", SHAPES)
def test_a_narrow_shape_keeps_its_proportions(name: str) -> None:
    """KV of a token, and states, beside widths: an eighth of the model's, layer by layer."""
    whole, narrow = (
        describe(config, 2).layers for config in (read_shape(name).config, narrow_config(name))
    )
    assert len(whole) == len(narrow)
    for one, other in zip(whole, narrow, strict=True):
        assert one.kind is other.kind
        assert one.token_bytes == pytest.approx(8 * other.token_bytes, rel=0.05)
