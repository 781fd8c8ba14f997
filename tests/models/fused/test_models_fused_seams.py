"""The fused pass as a :class:`PagedModel`: seams, rows, guards, and what has no recipe."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvell.attention.portable import PortableKernels
from kvell.models.config.description import describe
from kvell.models.families.families import EXACT, FUSED
from kvell.models.fused.decoder import fused_decoder
from kvell.models.fused.recipe import recipe_of
from kvell.models.loading.loading import load_paged_model
from kvell.models.loading.random_weights import random_module, write_random_model
from kvell.models.paged_model import PagedModel
from tests.models.fused_models import fused_model, generic_model, native
from tests.models.harness import prompt_ids, runner_over, tiny_config, tiny_module
from tests.models.loading.recorder import Recorder, assert_every_seam_in_order, batch_of
from tests.models.random_model import random_paged_model


def test_callbacks_come_at_every_seam_in_order() -> None:
    assert_every_seam_in_order(fused_model(tiny_module("Gemma3ForCausalLM")))


def test_callbacks_see_what_those_of_the_generic_pass_see() -> None:
    class Keeper(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def before_attend(self, layer: int, query: torch.Tensor) -> None:
            self.seen.append(query.clone())

        def after_attend(self, layer: int, output: torch.Tensor) -> None:
            self.seen.append(output.clone())

    keepers = [Keeper(), Keeper()]
    module = tiny_module("Qwen3ForCausalLM")
    for model, keeper in zip((fused_model(module), generic_model(module)), keepers, strict=True):
        runner = runner_over(model)
        runner.callbacks = keeper
        runner.step([("a", prompt_ids(9))])
    for ours, theirs in zip(keepers[0].seen, keepers[1].seen, strict=True):
        assert torch.allclose(ours, theirs.reshape(ours.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_callback_that_fails_ends_the_step(threads: int) -> None:
    class Broken(Recorder):
        def after_attend(self, layer: int, output: torch.Tensor) -> None:
            if layer == 1:
                raise KeyError("gone")

    model = fused_model(tiny_module("LlamaForCausalLM"), num_threads=threads)
    runner = runner_over(model)
    runner.callbacks = Broken()
    with pytest.raises(KeyError, match="gone"):
        runner.step([("a", prompt_ids(9))])
    whole = runner_over(model).step([("a", prompt_ids(9))])
    assert whole.isfinite().all()


def test_only_the_rows_asked_for_get_logits() -> None:
    model, ids = fused_model(tiny_module("Gemma2ForCausalLM")), prompt_ids(11)
    every = runner_over(model).step([("a", ids)])
    runner = runner_over(model)
    batch = replace(batch_of(runner, ids), logits_rows=torch.tensor([10, 3]))
    assert torch.equal(model.forward(batch), every[[10, 3]])


@pytest.mark.parametrize("made", [fused_model, generic_model])
def test_a_pass_says_once_that_it_begins(made: Callable[[Any], PagedModel]) -> None:
    """Before anything is written."""
    model, said = made(tiny_module("LlamaForCausalLM")), []
    runner = runner_over(model)
    untouched = runner.pool.clone()
    batch = batch_of(runner, prompt_ids(11))
    told = replace(batch, begun=lambda: said.append(torch.equal(runner.pool, untouched)))
    logits = model.forward(told)
    assert said == [True]
    assert torch.equal(logits, model.forward(batch))
    assert not torch.equal(runner.pool, untouched)


def test_a_step_without_logits() -> None:
    """A prefill chunk that does not end its prompt still writes its keys and values."""
    model, ids = fused_model(tiny_module("LlamaForCausalLM")), prompt_ids(11)
    runner = runner_over(model)
    batch = replace(batch_of(runner, ids[:10]), logits_rows=torch.empty(0, dtype=torch.int64))
    assert model.forward(batch).shape == (0, 509)
    runner.requests["a"].computed = 10
    last = runner.step([("a", ids[10:])])
    assert torch.equal(last, runner_over(model).step([("a", ids)])[10:])


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("token_ids", 509, "token_ids: 509"),
        ("token_ids", -1, "token_ids: -1"),
        ("logits_rows", 4, "logits_rows: 4"),
        ("positions", -3, "positions: -3"),
    ],
)
def test_numbers_that_name_nothing_are_refused(part: str, value: int, problem: str) -> None:
    model = fused_model(tiny_module("LlamaForCausalLM"))
    batch = batch_of(runner_over(model), [3, 4, 5, 6])
    wrong = getattr(batch, part).clone()
    wrong[1] = value
    with pytest.raises(ValueError, match=problem):
        model.forward(replace(batch, **{part: wrong}))


def test_pages_that_do_not_exist_are_refused() -> None:
    model = fused_model(tiny_module("LlamaForCausalLM"))
    batch = batch_of(runner_over(model), [3, 4, 5, 6])
    (group,) = batch.groups
    for part in ("page_ids", "write_page_ids", "write_offsets"):
        wrong = replace(group, **{part: torch.full_like(getattr(group, part), 1 << 20)})  # type: ignore[type-var]
        with pytest.raises(ValueError, match=part):
            model.forward(replace(batch, groups=(wrong,)))


def test_memory_must_be_attached_first() -> None:
    model = fused_model(tiny_module("LlamaForCausalLM"))
    batch = batch_of(runner_over(fused_model(tiny_module("LlamaForCausalLM"))), [3, 4])
    with pytest.raises(RuntimeError, match="attach"):
        model.forward(batch)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once(tied: bool) -> None:
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    if tied:
        module.lm_head.weight = module.model.embed_tokens.weight
    before = generic_model(module).weight_bytes
    model = fused_model(module)
    linears = [one for one in model.module.modules() if isinstance(one, nn.Linear)]
    assert sum(linear.weight.numel() for linear in linears) == 0
    assert before <= model.weight_bytes < 1.15 * before, "panels are padded"


def test_loading_makes_fused_models_unless_told_otherwise(tmp_path: Path) -> None:
    config, kernels = tiny_config("Qwen3ForCausalLM"), native.NativeKernels(1)
    path = write_random_model(tmp_path / "qwen3", config, seed=3, scale=8.0)
    models = [
        load_paged_model(path, kernels),
        load_paged_model(path, kernels, fused=False),
        load_paged_model(path, PortableKernels()),
        random_paged_model(config, kernels, 3, scale=8.0),
        random_paged_model(config, kernels, 3, scale=8.0, fused=False),
    ]
    assert [model.fused is not None for model in models] == [True, False, False, True, False]
    logits = [runner_over(model).step([("a", prompt_ids(9))]) for model in models]
    for other in logits[1:]:
        assert torch.allclose(logits[0], other, rtol=1e-3, atol=1e-3)


UNUSUAL: dict[str, Callable[[Any], None]] = {
    "a part more": lambda module: module.model.layers[1].add_module("extra", nn.Identity()),
    "another linear": lambda module: setattr(
        module.model.layers[1].mlp, "up_proj", nn.Sequential(module.model.layers[1].mlp.up_proj)
    ),
    "another activation": lambda module: setattr(module.model.layers[2].mlp, "act_fn", nn.ReLU()),
    "a rope that follows length": lambda module: setattr(
        module.model.rotary_emb, "rope_type", "dynamic"
    ),
    "a head with a bias": lambda module: module.lm_head.register_parameter(
        "bias", nn.Parameter(torch.ones(509))
    ),
    "layers left out": lambda module: module.model.layers.__delitem__(2),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_whatever_is_unusual_has_no_recipe(what: str) -> None:
    module = random_module(tiny_config("LlamaForCausalLM"), 3, torch.float32, 8.0)
    description = describe(module.config, 4)
    assert recipe_of(module, description) is not None
    UNUSUAL[what](module)
    assert recipe_of(module, description) is None


@pytest.mark.parametrize("architecture", sorted(EXACT - set(FUSED)))
def test_other_families_have_none(architecture: str) -> None:
    module = tiny_module(architecture)
    assert fused_decoder(module, describe(module.config, 4), native.NativeKernels(1)) is None


def test_layers_that_drop_tokens_have_none(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "m", tiny_config("LlamaForCausalLM"), seed=3, scale=8.0)
    model = load_paged_model(path, native.NativeKernels(1), kv_budget="24")
    assert model.fused is None
