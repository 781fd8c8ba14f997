"""Loading of weights from a transformers directory into transformers' own modules."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from kvell.models.config.configs import whole_config
from kvell.models.config.json_files import DO_NOT_LOAD, FETCH_MODEL_AGAIN, read_by_library
from kvell.models.families.families import WITH_IMAGES
from kvell.models.families.refusals import class_run
from kvell.models.fused.grouped import BlockWeight
from kvell.models.loading.missing_head import blocks_with_head, tensors_with_head
from kvell.models.loading.weight_files import WeightMap


@dataclass(frozen=True)
class _Unread:
    """A weight in blocks, decoded when transformers takes it, as it takes slices of files."""

    block: BlockWeight
    shape: torch.Size
    dtype: torch.dtype

    def __getitem__(self, _: object) -> torch.Tensor:
        return self.block.unpack(self.dtype).view(self.shape)


def load_module(weights: WeightMap, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a transformers causal LM, with weights in the given dtype on the device.

    transformers gets the tensors and no directory: it would choose files by rules of its own, and
    add adapters.

    :raises ChangeSomething: if a file is damaged or tensors are missing or misshapen.
    """
    tensors: dict[str, Any] = {**tensors_with_head(weights, config)}
    for name, block in blocks_with_head(weights, config).items():
        tensors[name] = _Unread(block, tensors[name].shape, dtype)
    transformers_logging.disable_progress_bar()
    with read_by_library(weights.path, DO_NOT_LOAD, FETCH_MODEL_AGAIN):
        whole = whole_config(config)
        module, report = getattr(transformers, class_run(whole)).from_pretrained(
            None, config=whole, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    weights.refuse_missing(sorted(report["missing_keys"]))
    return module.to(device)


def auto_class(config: Any) -> Any:
    takes_images = class_run(config) in WITH_IMAGES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
