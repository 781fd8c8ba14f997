"""Attention to images: who sees which, and what transformers says of it."""

import copy
from typing import Any

import pytest
import torch

from kvell.attention.portable import PortableKernels
from kvell.engine.running.forward_batches import seen_images
from kvell.errors import ChangeSomething
from kvell.memory import GroupKind
from kvell.models.families.families import CROSS_MODULES
from kvell.models.forward import image_side
from kvell.models.forward.image_side import CrossSlot, place_cross, seen_mask
from kvell.models.images.image_batch import SeenImages
from tests.models.pictures import (
    CROSS,
    Prompt,
    ServedPictures,
    oracle,
    picture_module,
    pictured,
    text,
)


def in_one_call(prompt: Prompt) -> torch.Tensor:
    """transformers' logits when everything is given at once, with the mask of its processor."""
    starts = [i for i, token in enumerate(prompt.token_ids) if token == 509]
    tiles = prompt.tensors["aspect_ratio_mask"]
    mask = torch.zeros(1, len(prompt.token_ids), *tiles.shape[1:], dtype=tiles.dtype)
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(prompt.token_ids)
        mask[:, start:end, number] = tiles[:, number]
    with torch.inference_mode():
        logits: torch.Tensor = picture_module(CROSS)(
            input_ids=torch.tensor([prompt.token_ids]),
            cross_attention_mask=mask,
            use_cache=False,
            **prompt.tensors,
        ).logits[0]
    return logits


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def test_an_image_at_the_start_is_exact_against_a_single_call() -> None:
    prompt = pictured(CROSS, 2, text(20))
    served = ServedPictures(CROSS)
    row = served.asked("q", prompt, outputs=1).logits[0]
    assert difference(row, in_one_call(prompt)[-1]) <= 1e-4


def test_in_a_single_call_text_before_an_image_would_see_it() -> None:
    """transformers masks what such rows get from the MLP, but not from attention: text would
    depend on what comes later.  Computed before there is an image, it does not."""
    prompt = pictured(CROSS, text(6), 0, text(6))
    other = Prompt(prompt.token_ids, {**prompt.tensors})
    other.tensors["pixel_values"] = prompt.tensors["pixel_values"] + 1.0
    assert difference(in_one_call(prompt)[:6], in_one_call(other)[:6]) > 1e-3
    assert torch.equal(oracle(CROSS, prompt)[:6], oracle(CROSS, other)[:6])


def test_text_without_images_skips_the_layers_that_attend_across() -> None:
    served = ServedPictures(CROSS)
    served.say("text", Prompt(text(20)))
    served.say("image", pictured(CROSS, text(3), 1, text(8)))
    served.run()
    served.check()


@pytest.mark.parametrize("number", [0, 1])
def test_only_the_images_that_are_seen_decide(number: int) -> None:
    """Text stands between the two: what follows the second sees that one alone."""
    prompt = pictured(CROSS, 1, text(4), 2, text(4))
    changed = Prompt(prompt.token_ids, {**prompt.tensors})
    changed.tensors["pixel_values"] = prompt.tensors["pixel_values"].clone()
    changed.tensors["pixel_values"][0, number] += 3.0
    rows = [ServedPictures(CROSS).asked("q", p, outputs=1).logits[0] for p in (prompt, changed)]
    # The first is still seen through the text that saw it.
    assert difference(*rows) > 1e-3


@pytest.mark.parametrize(
    ("position", "seen"),
    [(0, []), (2, [0]), (5, [0]), (6, [1]), (7, [2, 1]), (8, [3, 2, 1]), (9, [3, 2, 1])],
)
def test_a_token_sees_the_last_image_and_those_right_before_it(
    position: int, seen: list[int]
) -> None:
    images = [(2, 1, 5), (6, 1, 5), (7, 1, 5), (8, 1, 5)]
    assert seen_images(images, position) == seen


def test_who_sees_an_image_is_told_to_the_layers() -> None:
    batch = None
    seen = [SeenImages(torch.tensor(rows), batch) for rows in ([1, 3], [3])]  # type: ignore[arg-type]
    mask = seen_mask(seen, 5, torch.zeros(1, dtype=torch.bfloat16))
    assert mask.dtype == torch.bfloat16
    assert mask.shape == (1, 1, 5, 1)
    assert mask.flatten().tolist() == [0, 1, 0, 1, 0]


def test_a_layer_that_no_module_is_known_for_is_refused() -> None:
    module = copy.deepcopy(picture_module(CROSS))
    with pytest.raises(ChangeSomething, match=r"has cross-attention in layers \[1, 2, 3\]"):
        place_cross(module, frozenset({2}), CROSS_MODULES, PortableKernels())


def test_layers_that_attend_across_come_in_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slots: list[CrossSlot] = []

    def placed(*given: Any) -> tuple[CrossSlot, ...]:
        slots[:] = place_cross(*given)
        return tuple(slots)

    monkeypatch.setattr(image_side, "place_cross", placed)
    served = ServedPictures(CROSS)
    assert [slot.layer for slot in slots] == [1, 3]
    for slot in slots:
        slot.layer = 3
    served.say("q", pictured(CROSS, 0, text(3)))
    served.step()
    assert str(served.engine.failed_steps.last) == "layer 3 cross-attends out of turn"


def test_image_tokens_lie_in_pages_of_their_own_and_stay() -> None:
    """15 tokens of three tiles in one page, whatever the text does."""
    served = ServedPictures(CROSS)
    served.say("q", pictured(CROSS, text(3), 2, text(40)), outputs=4)
    group = served.group(GroupKind.CROSS)
    while served.engine.has_work():
        served.step()
        if served.engine.has_work():
            assert served.engine.core.memory.totals().used_pages[group] == 1
    served.check()
