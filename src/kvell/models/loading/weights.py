"""Loading of weights from a transformers directory into transformers' own modules.

Checkpoints without a head, which serve embeddings alone.

Files of embedding models have the body of a decoder: no ``lm_head.weight``, although their config
does not tie it to the embedding. The embedding stands in for it, so that every pass has a head, and
requests for text are refused (``ModelRules.has_head``): transformers would draw a random head.
"""

from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from kvell.models.config.configs import whole_config
from kvell.models.config.json_files import DO_NOT_LOAD, FETCH_MODEL_AGAIN, read_by_library
from kvell.models.families import parallel_heads
from kvell.models.families.families import WITH_IMAGES
from kvell.models.families.refusals import class_run
from kvell.models.loading.missing_head import tensors_with_head
from kvell.models.loading.weight_files import WeightMap

if TYPE_CHECKING:
    import torch


def load_module(weights: WeightMap, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a transformers causal LM, with weights in the given dtype on the device.

    transformers gets the tensors and no directory: it would choose files by rules of its own, and
    add adapters.

    :raises ChangeSomething: if a file is damaged or tensors are missing or misshapen.
    """
    tensors = tensors_with_head(weights, config)
    transformers_logging.disable_progress_bar()
    with read_by_library(weights.path, DO_NOT_LOAD, FETCH_MODEL_AGAIN):
        whole = whole_config(config)
        module, report = _class_of(whole).from_pretrained(
            None, config=whole, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    weights.refuse_missing(sorted(report["missing_keys"]))
    return module.to(device)


def _class_of(config: object) -> Any:
    """Return the class that transformers would run; Kvell's own for types that it lacks."""
    name = class_run(config)
    return getattr(transformers, name, None) or getattr(parallel_heads, name)


def auto_class(config: Any) -> Any:
    takes_images = class_run(config) in WITH_IMAGES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
