"""States over pages against transformers: cuts, resumption, and the seams of the mixers."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething
from kvell.models.config.description import describe
from kvell.models.families.families import MIXER_KINDS
from kvell.models.loading.random_weights import LOG_DECAYS, random_module
from kvell.models.paged_model import ForwardBatch, PagedModel
from kvell.models.states.mixer_slots import StatePass, during, place_mixers
from kvell.models.states.mixers import MIXERS
from kvell.models.states.state_run import StateRun
from kvell.pages.layout import GroupKind
from tests.models.cases import families
from tests.models.harness import (
    STATES,
    PagedRunner,
    assert_exact,
    oracle_logits,
    paged,
    prompt_ids,
    runner_over,
    tiny_config,
    tiny_module,
)

every_family = pytest.mark.parametrize("architecture", families(STATES))
CUTS = (1, 2, 40, 64, 100, 128)


def roomy(module: Any) -> PagedRunner:
    return runner_over(paged(module), large_pages=60)


@every_family
def test_states_kept_on_the_way_are_resumed_exactly(architecture: str) -> None:
    """Cuts inside one step, inside and at the ends of scan chunks, beside another request."""
    module, ids, other = tiny_module(architecture), prompt_ids(150), prompt_ids(75, seed=2)
    expected, runner = oracle_logits(module, ids), roomy(module)
    logits = runner.step([("other", other), ("a", ids)], {"a": CUTS, "other": (33,)})
    assert_exact(logits[75:], expected)
    for length in CUTS:
        runner.resume(f"from{length}", "a", length)
        assert_exact(runner.step([(f"from{length}", ids[length:])]), expected[length:])
    runner.resume("again", "other", 33)
    assert_exact(runner.step([("again", other[33:])]), oracle_logits(module, other)[33:])


@every_family
def test_a_state_kept_by_a_later_chunk_is_that_of_one_pass(architecture: str) -> None:
    module, ids = tiny_module(architecture), prompt_ids(120)
    runner = roomy(module)
    runner.step([("a", ids[:50])])
    runner.step([("a", ids[50:51])], {"a": (51,)})
    runner.step([("a", ids[51:])], {"a": (96, 120)})
    for length in (51, 96):
        runner.resume(f"from{length}", "a", length)
        logits = runner.step([(f"from{length}", ids[length:])])
        assert_exact(logits, oracle_logits(module, ids)[length:])


@every_family
def test_a_state_of_another_length_gives_other_logits(architecture: str) -> None:
    """One token too many in the state shows, so exactness above says something."""
    module, ids = tiny_module(architecture), prompt_ids(80)
    runner = roomy(module)
    runner.step([("a", ids)], {"a": (63, 64)})
    runner.kept["a", 64] = runner.kept["a", 63]
    runner.resume("b", "a", 64)
    logits = runner.step([("b", ids[64:])])
    expected = oracle_logits(module, ids)[64:]
    assert (logits - expected).abs().max() > 1e-3 * expected.abs().max()


@every_family
def test_an_early_token_reaches_the_end_through_states(architecture: str) -> None:
    """With all of attention's pages wiped but the last: states remember."""
    ids, last = prompt_ids(12), []
    for first in (ids[0], ids[0] + 1):
        runner = roomy(tiny_module(architecture))
        runner.step([("a", [first, *ids[1:-1]])])
        for group, spec in enumerate(runner.layout.groups):
            if spec.kind is not GroupKind.STATE:
                for page in runner.requests["a"].pages[group][:2]:
                    runner.page_bytes(group, page).zero_()
        last.append(runner.step([("a", ids[-1:])])[0])
    assert (last[0] - last[1]).abs().max() > 1e-5 * last[0].abs().max()


@every_family
def test_bfloat16_models_stay_near_their_own_oracle(architecture: str) -> None:
    """Rounding differs, so by the root of the mean square: 5 % of the logits' own."""
    module, ids = random_module(tiny_config(architecture), 3, torch.bfloat16, 1.0), prompt_ids(70)
    runner, expected = roomy(module), oracle_logits(module, ids)
    logits = torch.cat([runner.step([("a", ids[:33])]), runner.step([("a", ids[33:])])])
    assert (logits - expected).square().mean() < (0.05**2) * expected.square().mean()


def test_random_decays_let_states_remember() -> None:
    """With transformers' own, random states forget within a token or two."""
    module = tiny_module("JambaForCausalLM")
    decays = module.model.layers[0].mamba.A_log.detach()
    low, high = LOG_DECAYS
    assert low <= float(decays.min()) < low + 1 < high - 1 < float(decays.max()) <= high


def test_every_listed_module_has_a_mixer_of_its_kind() -> None:
    assert set(MIXER_KINDS.values()) == set(MIXERS)


def test_a_layer_whose_module_is_not_known_is_refused() -> None:
    module = copy.deepcopy(tiny_module("JambaForCausalLM"))
    description = describe(module.config, 4)
    with pytest.raises(ChangeSomething, match=r"layers \[0, 2\]"):
        place_mixers(module, description, {"BambaMixer": "scalar-decay"})


def test_a_mixer_that_the_description_knows_nothing_of_is_refused() -> None:
    module = copy.deepcopy(tiny_module("BambaForCausalLM"))
    description = describe(module.config, 4)
    fewer = tuple(layer for layer in description.layers if layer.index != 2)
    with pytest.raises(ChangeSomething, match=r"layers \[2\]"):
        PagedModel(module, replace(description, layers=fewer), PortableKernels())


def test_other_models_of_the_class_keep_their_own_forward_pass() -> None:
    module = tiny_module("Lfm2ForCausalLM")
    model = paged(module)
    assert "forward" in vars(model.module.model.layers[0].conv)
    assert "forward" not in vars(module.model.layers[0].conv)


def test_states_outside_a_paged_step_are_refused() -> None:
    """The model cannot be run past its pages, before or after a step."""
    model = paged(tiny_module("Qwen3NextForCausalLM"))
    ids = torch.tensor([prompt_ids(3)])
    hidden = model.module.model.embed_tokens(ids)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="layer 0 has states"):
            model.module.model.layers[0].linear_attn(hidden)
        runner_over(model).step([("a", prompt_ids(3))])


def test_a_step_that_fails_leaves_no_mixer_with_its_states() -> None:
    slot = place_mixers(
        copy.deepcopy(tiny_module("Lfm2ForCausalLM")),
        describe(tiny_config("Lfm2ForCausalLM"), 4),
        MIXER_KINDS,
    )[0]

    class Step(StatePass):
        def __init__(self) -> None:
            pass

        def states(self, layer: int) -> StateRun:
            raise KeyError(layer)

    with pytest.raises(KeyError), during([slot], Step()):
        slot(torch.zeros(1, 2, 48))
    assert slot.step is None


def test_mixers_that_run_out_of_order_are_noticed() -> None:
    model = paged(tiny_module("JambaForCausalLM"))
    layers = model.module.model.layers
    layers[0], layers[2] = layers[2], layers[0]
    with pytest.raises(RuntimeError, match=r"layer 2 asks .* expected \[0\]"):
        runner_over(model).step([("a", prompt_ids(4))])


def test_a_group_of_states_needs_metadata_of_states() -> None:
    model = paged(tiny_module("BambaForCausalLM"))
    runner = runner_over(model)
    seen: list[ForwardBatch] = []
    forward = model.forward

    def spy(batch: ForwardBatch, callbacks: Any = None) -> torch.Tensor:
        seen.append(batch)
        return forward(batch, callbacks)

    model.forward = spy  # type: ignore[assignment, method-assign]
    runner.step([("a", prompt_ids(4))])
    with pytest.raises(RuntimeError, match="no metadata for"):
        forward(replace(seen[0], groups=seen[0].groups[::-1]))
