"""What encoding images takes beside weights and KV memory, from the config alone."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvell.models.activations import (
    activation_model,
    encoder_bytes,
)
from kvell.models.image_families import FAMILIES
from tests.models.harness import tiny_config
from tests.models.pictures import CROSS, EVERY, PATCHES, PREFIX, picture_module, pictured

KINDS: dict[str, Any] = {PATCHES: "patches", CROSS: "cross", PREFIX: "prefix"}


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most_bytes = 0
        self._before = {id(x) for x in gc.get_objects() if isinstance(x, torch.Tensor)}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        alive = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in alive
            if id(x) not in self._before
        }
        self.most_bytes = max(self.most_bytes, sum(storages.values()))
        return result


@pytest.mark.filterwarnings("ignore::FutureWarning")  # looking at all objects wakes some up
@pytest.mark.parametrize("architecture", EVERY)
def test_the_largest_image_takes_no_more_than_said(architecture: str) -> None:
    module = copy.deepcopy(picture_module(architecture))
    module.set_attn_implementation("sdpa")  # as it is served: no scores of all pairs
    family = FAMILIES[KINDS[architecture]](module)
    [image] = family.images(pictured(architecture, 3).tensors)
    with torch.inference_mode(), Living() as living:
        family.encode(image)
    said_bytes = encoder_bytes(module.config)
    assert said_bytes / 20 < living.most_bytes <= said_bytes


def test_an_encoder_is_a_part_of_the_reserve() -> None:
    config = picture_module(PATCHES).config
    text = activation_model(config.text_config).fixed_bytes
    assert activation_model(config).fixed_bytes == text + encoder_bytes(config)


def test_a_model_of_text_has_none() -> None:
    assert encoder_bytes(tiny_config("LlamaForCausalLM")) == 0
