"""Bytes of a model's weights, from its config alone.

The class that transformers would run is built on the meta device, where a tensor has a
shape and no bytes.
"""

import copy
from typing import Any

import torch
import transformers

from kvell.models.families import parallel_heads
from kvell.models.families.refusals import class_run

DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""Dtype of weights, by bytes of an element."""


def weights_bytes(config: Any, element_bytes: int) -> int | None:
    """Return the bytes of all parameters and buffers of a checkpoint; tied ones count once.

    :param element_bytes: bytes of an element, 2 or 4; some families keep a few in float32.
    :return: None if transformers has no class for the config, or cannot build it here.
    """
    name = class_run(config)
    named = getattr(transformers, name, None) or getattr(parallel_heads, name, None)
    if named is None:
        return None
    try:
        with torch.device("meta"):
            module = named._from_config(copy.deepcopy(config), dtype=DTYPES[element_bytes])
    except (ImportError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        return None
    kept: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return sum({id(tensor): tensor.nbytes for tensor in kept.values()}.values())
