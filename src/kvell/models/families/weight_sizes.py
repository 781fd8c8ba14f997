"""Bytes of a model's weights, from its config alone.

The tensors of common families follow from the config (``plain_weights``). For others the class that
transformers would run is built on the meta device, where a tensor has a shape and no bytes.
"""

import copy
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvell.models.config.config_fields import architecture
from kvell.models.config.json_files import MALFORMED, REPAIR_CONFIG, read_by_library
from kvell.models.families.plain_weights import FLOAT32, plain_tensors
from kvell.models.families.quantised_bytes import quantised_bytes
from kvell.models.families.quantised_schemes import without_quantiser

if TYPE_CHECKING:
    import torch


def weights_bytes(config: Any, element_bytes: int) -> int | None:
    """Return the bytes of all parameters and buffers of a checkpoint; tied ones count once.

    Quantised weights count as their files store them.

    :param element_bytes: bytes of an element, 2 or 4; some families keep a few in float32.
    :return: None if no class is known for the config, it cannot be built here, or its quantiser is
        not known.
    :raises ChangeSomething: if its ``quantization_config`` is malformed.
    """
    quantised = getattr(config, "quantization_config", None)
    if isinstance(config, SimpleNamespace):
        with read_by_library(architecture(config), MALFORMED, REPAIR_CONFIG):
            shapes = plain_tensors(config)
            if shapes is not None and not quantised:
                wide = FLOAT32.get(config.model_type)
                return sum(
                    math.prod(shape) * (4 if wide and name.endswith(wide) else element_bytes)
                    for name, shape in shapes.items()
                )
    else:
        tensors = _built(config, element_bytes)
        if tensors is not None and not quantised:
            return sum(tensor.nbytes for tensor in tensors.values())
        shapes = None
        if tensors is not None:
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return None if shapes is None else quantised_bytes(shapes, quantised, element_bytes)


def _built(config: Any, element_bytes: int) -> "Mapping[str, torch.Tensor] | None":
    """Return the tensors of the class that transformers would run, each once, on meta."""
    # Imported here: they take seconds, and plain configs do not need them.
    import torch
    import transformers

    from kvell.models.families.refusals import class_run

    name = class_run(config)
    named = getattr(transformers, name, None)
    if named is None:
        return None
    dtype = torch.bfloat16 if element_bytes == 2 else torch.float32
    try:
        with torch.device("meta"):
            module = named._from_config(without_quantiser(copy.deepcopy(config)), dtype=dtype)
    except Exception:  # transformers' classes raise errors of any type for odd sizes
        return None
    kept: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    once = {id(tensor): (name, tensor) for name, tensor in reversed(kept.items())}
    return dict(once.values())
