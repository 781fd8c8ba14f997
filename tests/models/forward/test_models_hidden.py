"""What the head reads, by either pass, against transformers' own last hidden state."""

import copy
from dataclasses import replace

import pytest
import torch

from kvell.models.forward.module_pass import HeadInput
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.fused.need import FLOAT_BYTES, align
from kvell.models.paged_model import ForwardBatch, PagedModel
from tests.models.cases import families
from tests.models.forward.hidden import last_hidden_state
from tests.models.harness import FAMILIES, paged, prompt_ids, runner_over, tiny_module

IDS = prompt_ids(37)
CHUNKS = (20, 1, 16)
FUSED = ("FalconH1ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM")


class Asking:
    """Wants what the head reads in every step, or in none."""

    def __init__(self, model: PagedModel, *, wants: bool = True) -> None:
        self.model, self.seen = model, list[torch.Tensor]()
        forward = model.forward

        def asking(batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
            asked = replace(batch, wants_hidden=wants)
            logits = forward(asked, callbacks)
            if wants:
                self.seen.append(model.hidden(asked).clone())
            return logits

        model.forward = asking  # type: ignore[assignment, method-assign]
        self.runner = runner_over(model)

    def of(self, ids: list[int]) -> torch.Tensor:
        """Of all tokens, in chunks that a neighbour shares."""
        rows, start = [], 0
        for index, count in enumerate(CHUNKS):
            self.seen.clear()
            self.runner.step([("a", ids[start : start + count]), ("b", prompt_ids(3, index))])
            rows.append(self.seen[0][:count])
            start += count
        return torch.cat(rows)


def assert_same_direction(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Some heads read a multiple of what the final norm gives; length one is what is served."""
    ours, theirs = (torch.nn.functional.normalize(rows, dim=-1) for rows in (actual, expected))
    assert ours.shape == theirs.shape
    assert (ours * theirs).sum(-1).min() >= 1 - 1e-5
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("architecture", families(FAMILIES))
def test_of_every_family_by_modules(architecture: str) -> None:
    module = tiny_module(architecture)
    assert_same_direction(Asking(paged(module)).of(IDS), last_hidden_state(module, IDS))


@pytest.mark.parametrize("architecture", FUSED)
def test_by_the_compiled_pass(architecture: str) -> None:
    from tests.models.fused_models import fused_model

    module = tiny_module(architecture)
    assert_same_direction(Asking(fused_model(module)).of(IDS), last_hidden_state(module, IDS))


@pytest.mark.parametrize("architecture", FUSED)
def test_in_16_bits_both_passes_agree(architecture: str) -> None:
    from tests.models.fused_models import bf16_module, fused_model, generic_model

    module = bf16_module(architecture)
    ours, theirs = (Asking(make(module)).of(IDS) for make in (fused_model, generic_model))
    assert ours.dtype == theirs.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.999


def test_the_compiled_pass_has_it_where_the_layout_says() -> None:
    """Behind the stream: what is behind it in turn lies where the pass itself says."""
    from tests.models.fused_models import fused_model

    model = fused_model(tiny_module("Gemma3ForCausalLM"))
    assert model.fused is not None
    for tokens, rows in ((1, 1), (7, 3), (100, 100)):
        query, _ = model.fused._forward.attention_offsets(tokens, rows)
        shape = model.fused._shape
        sizes = (
            FLOAT_BYTES * shape.hidden,
            shape.element_bytes * shape.hidden,
            FLOAT_BYTES * shape.projected,
        )
        assert sum(align(size * tokens) for size in sizes) == query


def test_logits_are_the_same_whether_or_not_it_is_wanted() -> None:
    from tests.models.fused_models import fused_model

    for make in (fused_model, paged):
        asking, plain = (
            Asking(make(tiny_module("LlamaForCausalLM")), wants=wants) for wants in (True, False)
        )
        logits = [one.runner.step([("a", IDS), ("b", IDS[:5])]) for one in (asking, plain)]
        assert torch.equal(*logits)


def test_nothing_is_kept_of_a_step_that_did_not_want_it() -> None:
    model = paged(tiny_module("LlamaForCausalLM"))
    runner = Asking(model, wants=False).runner
    runner.step([("a", IDS)])
    head = model.module.get_output_embeddings()
    assert not head._forward_pre_hooks
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="not asked"):
        model.hidden(ForwardBatch(empty, empty, (), empty))
    with pytest.raises(RuntimeError, match="head did not run"):
        HeadInput(model.module).rows()


def test_the_hook_goes_even_if_the_pass_fails() -> None:
    module = copy.deepcopy(tiny_module("LlamaForCausalLM"))
    kept = HeadInput(module)
    with pytest.raises(RuntimeError, match="a fault"), kept.recording(True):
        raise RuntimeError("a fault")
    assert not module.get_output_embeddings()._forward_pre_hooks
