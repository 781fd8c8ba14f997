"""Loading of weights from a transformers directory into transformers' own modules."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import DO_NOT_LOAD, FETCH_MODEL_AGAIN, read_by_library
from kvell.models.families import parallel_heads as _own  # registers its class  # noqa: F401
from kvell.models.families.families import WITH_IMAGES
from kvell.models.families.refusals import class_run
from kvell.models.loading.weight_files import checked_weight_files


def load_module(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a transformers causal LM, with weights in the given dtype on the device.

    :raises ChangeSomething: if a file is damaged or tensors are missing or misshapen.
    """
    checked_weight_files(path)
    transformers_logging.disable_progress_bar()
    with read_by_library(path, DO_NOT_LOAD, FETCH_MODEL_AGAIN):
        module, report = auto_class(config).from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    _require_all(path, report["missing_keys"])
    return module.to(device)


def auto_class(config: Any) -> Any:
    """Return transformers' auto class for a config's model with a head that generates text."""
    takes_images = class_run(config) in WITH_IMAGES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _require_all(path: Path, missing: Iterable[str]) -> None:
    """Refuse missing tensors, which transformers would fill with random numbers."""
    names = sorted(missing)
    if names:
        problem = f"its weights lack {len(names)} tensors, such as {names[0]}"
        raise ChangeSomething("model", path, problem, "fetch the model again")
