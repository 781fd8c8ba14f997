"""Bytes of a model's weights, from its config alone.

The class that transformers would run is built on the meta device, where a tensor has a
shape and no bytes.
"""

import copy
from types import SimpleNamespace
from typing import Any

from kvell.models.families.plain_weights import plain_weights_bytes


def weights_bytes(config: Any, element_bytes: int) -> int | None:
    """Return the bytes of all parameters and buffers of a checkpoint; tied ones count once.

    :param element_bytes: bytes of an element, 2 or 4; some families keep a few in float32.
    :return: None if no class is known for the config, or it cannot be built here.
    """
    if isinstance(config, SimpleNamespace):
        return plain_weights_bytes(config, element_bytes)
    # Imported here: they take seconds, and plain configs do not need them.
    import torch
    import transformers

    from kvell.models.families import parallel_heads
    from kvell.models.families.refusals import class_run

    name = class_run(config)
    named = getattr(transformers, name, None) or getattr(parallel_heads, name, None)
    if named is None:
        return None
    dtype = torch.bfloat16 if element_bytes == 2 else torch.float32
    try:
        with torch.device("meta"):
            module = named._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception:  # transformers' classes raise errors of any type for odd sizes
        return None
    kept: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return sum({id(tensor): tensor.nbytes for tensor in kept.values()}.values())
