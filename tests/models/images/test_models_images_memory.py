"""What images take of the memory: embeddings wait for prefill, and no longer than that."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvell.engine.protocol.messages import Finished, Submit
from kvell.engine.protocol.request_spec import RequestSpec
from kvell.engine.protocol.sampling_params import SamplingParams
from kvell.engine.setup.options import EngineOptions
from kvell.engine.setup.sizes import layout_of
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind, GroupSpec, pool_bytes_for
from kvell.models.config.description import ModelDescription, describe
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.images.image_content import ImagePrompt
from kvell.models.paged_model import ForwardBatch
from kvell.testing.accepting import is_accepted
from kvell.vocabulary import RequestId
from tests.models.cases import covering
from tests.models.pictures import (
    CROSS,
    PATCHES,
    PREFIX,
    Prompt,
    ServedPictures,
    picture_module,
    pictured,
    text,
)

CHUNK_TOKENS = 16


class Peak:
    """Most bytes of used pages that a step has had while it computed."""

    def __init__(self, served: ServedPictures) -> None:
        self.used_bytes = 0
        self._served = served
        self._forward = served.recorder.model.forward
        served.recorder.model.forward = self.forward  # type: ignore[assignment, method-assign]

    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        used = self._served.engine.core.memory.totals().used_pages
        strides = [group.page_stride_bytes for group in self._served.layout.groups]
        self.used_bytes = max(self.used_bytes, sum(map(int.__mul__, used, strides)))
        return self._forward(batch, callbacks)


def group_of(served: ServedPictures, kind: GroupKind) -> GroupSpec:
    return served.layout.groups[served.group(kind)]


def image_last(before: int) -> Prompt:
    """The worst case: all keys and values are there when the last embeddings are read."""
    return pictured(PATCHES, text(before), 0)


def kv_bytes(served: ServedPictures, tokens: int) -> int:
    group = group_of(served, GroupKind.FULL)
    return -(-tokens // group.page_tokens) * group.page_stride_bytes


@pytest.mark.parametrize(("before", "pages"), [(3 * CHUNK_TOKENS, 1), (45, 2)])
def test_embeddings_are_freed_as_they_are_consumed(before: int, pages: int) -> None:
    """At most the prompt's keys and values, and the pages of one prefill chunk's embeddings."""
    served = ServedPictures(PATCHES, batched=CHUNK_TOKENS)
    peak, prompt = Peak(served), image_last(before)
    served.asked("q", prompt, outputs=1)
    vision = group_of(served, GroupKind.VISION)
    assert vision.page_tokens == CHUNK_TOKENS
    chunk_bytes = pages * vision.page_stride_bytes
    assert peak.used_bytes <= kv_bytes(served, len(prompt.token_ids)) + chunk_bytes
    served.check()


def test_embeddings_may_wait_where_their_keys_and_values_will_be() -> None:
    """Then the prompt's keys and values are all it takes."""
    served = ServedPictures(PATCHES, batched=CHUNK_TOKENS, embeddings="in-kv")
    assert all(group.kind is GroupKind.FULL for group in served.layout.groups)
    peak, prompt = Peak(served), image_last(45)
    served.asked("q", prompt, outputs=1)
    assert peak.used_bytes <= kv_bytes(served, len(prompt.token_ids))
    served.check()


@covering({"architecture": [PATCHES, PREFIX], "batched": [7, 23, 256]}, together=1)
def test_embeddings_in_keys_and_values_are_read_before_they_are_overwritten(
    architecture: str, batched: int
) -> None:
    """Chunks end inside pages: what is written there leaves the other tokens' rows alone."""
    served = ServedPictures(
        architecture, batched=batched if architecture == PATCHES else 64, embeddings="in-kv"
    )
    for seed in range(4):
        prompt = pictured(architecture, text(3 + seed, seed), seed, text(9, seed))
        served.say(f"q{seed}", prompt, outputs=10)
    served.say("text", pictured(architecture, text(30)))
    served.say("two", pictured(architecture, text(2), 1, text(3), 2, text(9)))
    served.run()
    served.check()


def test_images_in_keys_and_values_are_encoded_again_for_a_prefix_of_other_text() -> None:
    """What was overwritten is gone."""
    served = ServedPictures(PATCHES, embeddings="in-kv")
    for seed in (1, 2):
        served.asked(f"q{seed}", pictured(PATCHES, text(9, seed), 0, text(9)))
    assert served.store.encoder_runs == 2
    served.check()


def test_embeddings_too_large_for_keys_and_values_get_pages_of_their_own() -> None:
    embeddings = next(x for x in described().layers if x.kind is GroupKind.VISION)
    full = described().layers[0]
    narrow = replace(full, kv_heads=1, head_size=8)
    assert narrow.token_bytes < embeddings.token_bytes <= full.token_bytes
    options = EngineOptions(embeddings="in-kv")
    kinds = [
        [g.kind for g in layout_of((x, embeddings), 1 << 20, options).groups]
        for x in (full, narrow)
    ]
    assert kinds == [[GroupKind.FULL], [GroupKind.FULL, GroupKind.VISION]]


def described() -> ModelDescription:
    return describe(picture_module(PATCHES).config, 4)


def test_an_embedding_that_is_changed_while_it_waits_changes_the_output() -> None:
    last = []
    for tamper in (False, True):
        served = ServedPictures(PATCHES, batched=CHUNK_TOKENS)
        served.say("q", pictured(PATCHES, text(5), 0), outputs=1)
        served.step()
        if tamper:
            holder = served.engine.core.memory.snapshot().holders[0]
            vision = served.group(GroupKind.VISION)
            page = holder.groups[vision][1][-1]
            served.page_bytes(vision, page).view(torch.float32).nan_to_num_().add_(9.0)
        served.run()
        last.append(served.answers["q"].logits[-1])
    assert (last[0] - last[1]).abs().max() > 1e-3 * last[0].abs().max()


def test_nothing_is_left_when_all_is_done() -> None:
    served = ServedPictures(PATCHES)
    for seed in range(3):
        served.say(f"q{seed}", pictured(PATCHES, text(4, seed), seed, text(9)))
    served.run()
    assert set(served.engine.core.memory.totals().used_pages) == {0}


@pytest.mark.parametrize("architecture", [PATCHES, CROSS, PREFIX])
def test_keys_and_values_of_images_in_sixteen_bits(architecture: str) -> None:
    """Embeddings keep the model's own precision."""
    served = ServedPictures(architecture, kv_dtype=torch.bfloat16)
    for group in served.layout.groups:
        if group.kind is GroupKind.VISION:
            assert (
                group.token_bytes == picture_module(architecture).config.text_config.hidden_size * 4
            )
    served.asked("q", pictured(architecture, text(9), 0, text(20)))
    assert 1e-6 < served.error("q") < 0.1


def test_a_page_of_all_layers_cannot_be_attended_to_across() -> None:
    """``paged`` keeps tokens of images among those of the text."""
    with pytest.raises(ChangeSomething, match="--manager"):
        ServedPictures(CROSS, manager="paged")


@pytest.mark.parametrize("architecture", [PATCHES, PREFIX])
def test_one_page_size_for_keys_values_and_embeddings(architecture: str) -> None:
    served = ServedPictures(architecture, manager="paged")
    served.asked("q", pictured(architecture, text(9), 0, text(20)))
    served.check()


def test_a_pool_too_small_for_an_image_is_said_at_once() -> None:
    """There is room for the text, and for nothing beside it."""
    need_bytes = pool_bytes_for(ServedPictures(CROSS).layout, 64, 64)
    served = ServedPictures(CROSS, kv_bytes=need_bytes, max_model_len=64)
    prompt = pictured(CROSS, text(3), 3, text(50))
    told = served.store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    [refused] = served.engine.handle(submit_of(told))
    assert isinstance(refused, Finished)
    assert "do not fit into KV memory" in refused.message


@pytest.mark.parametrize(("batched", "is_served"), [(43, False), (44, True)])
def test_a_prompt_that_no_step_can_hold_whole_is_refused(batched: int, is_served: bool) -> None:
    served = ServedPictures(PREFIX, batched=batched)
    prompt = pictured(PREFIX, 0, text(35))
    told = served.store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    events = served.engine.handle(submit_of(told))
    assert is_served == is_accepted(events)
    if not is_served:
        [refused] = events
        assert isinstance(refused, Finished)
        assert refused.reason == "refused"
        assert refused.message.endswith("--max-num-batched-tokens 44")


def test_images_that_nobody_has_given_are_refused() -> None:
    served = ServedPictures(PATCHES)
    prompt = pictured(PATCHES, text(3), 0)
    told = served.store.take(np.asarray(prompt.token_ids, np.int32), prompt.tensors)
    served.store.release(told)
    [refused] = served.engine.handle(submit_of(told))
    assert isinstance(refused, Finished)
    assert refused.field == "images"


def submit_of(told: ImagePrompt) -> Submit:
    params = SamplingParams(temperature=0, max_tokens=8)
    return Submit(RequestSpec(RequestId("q"), told.token_ids.tobytes(), params, images=told.images))
