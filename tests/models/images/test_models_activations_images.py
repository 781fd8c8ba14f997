"""What encoding images takes beside weights and KV memory, from the config alone."""

import copy
import gc
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from kvell.models.config.activations import (
    activation_model,
    encoder_bytes,
)
from kvell.models.config.multimodal import MOST_GRID_TOKENS
from kvell.models.images.image_families import FAMILIES
from tests.models.harness import tiny_config
from tests.models.pictures import EVERY, KINDS, PATCHES, picture_module, pictured


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        alive = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
        self.most_bytes = max(self.most_bytes, sum(storages.values()))
        return result


@pytest.mark.filterwarnings("ignore::FutureWarning")  # looking at all objects wakes some up
@pytest.mark.parametrize("architecture", EVERY)
def test_the_largest_image_takes_no_more_than_said(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where images may have any size, this one is as large as they may be."""
    module = copy.deepcopy(picture_module(architecture))
    module.set_attn_implementation("sdpa")  # as it is served: no scores of all pairs
    family = FAMILIES[KINDS[architecture]](module)
    [image] = family.read_images(pictured(architecture, 3).tensors)
    monkeypatch.setattr("kvell.models.config.activations.MOST_GRID_TOKENS", image.tokens)
    gc.freeze()  # what was there before is looked at no more
    try:
        with torch.inference_mode(), Living() as living:
            family.encode(image)
    finally:
        gc.unfreeze()
    said_bytes = encoder_bytes(module.config)
    assert said_bytes / 20 < living.most_bytes <= said_bytes


def test_an_encoder_is_a_part_of_the_reserve() -> None:
    config = picture_module(PATCHES).config
    text = activation_model(config.text_config).fixed_bytes
    assert activation_model(config).fixed_bytes == text + encoder_bytes(config)


def test_images_of_any_size_are_bounded_by_what_is_served() -> None:
    """The reserve grows with the bound, and an image beyond it is refused by its size."""
    config = transformers.Qwen2_5_VLConfig()
    patches, said_bytes = MOST_GRID_TOKENS * 4, encoder_bytes(config)
    hidden, inner, projected, numbers = 3584, 3420, 8192, 3 * 2 * 14**2
    assert said_bytes == 4 * patches * (12 * hidden + 3 * inner + 4 * projected + 2 * numbers)


def test_sizes_of_two_numbers() -> None:
    """InternVL says height and width; one piece of an image is encoded at a time."""
    config = transformers.InternVLConfig()
    assert tuple(config.vision_config.image_size) == (448, 448)
    numbers = (12 + 24) * 1024 + 3 * 4096 + 4 * config.text_config.hidden_size
    assert encoder_bytes(config) == 4 * ((32 * 32 + 1) * numbers + 2 * 3 * 448**2)


def test_a_model_of_text_has_none() -> None:
    assert encoder_bytes(tiny_config("LlamaForCausalLM")) == 0
