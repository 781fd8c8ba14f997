"""Weights from a transformers directory: checked first, then mapped and cast.

Files are checked by their headers alone, so that a download that broke off is
named in one line instead of failing somewhere inside a library.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from kvell.errors import ChangeSomething
from kvell.models import parallel_heads as _own  # transformers learns it  # noqa: F401
from kvell.models.configs import MALFORMED, read_optional_json
from kvell.models.families import WITH_IMAGES
from kvell.models.refusals import class_run

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory: what its index names, or the single one.

    :raises ChangeSomething: if there are none, or if the index names one that is missing.
    """
    shards = set(read_optional_json(path / INDEX_FILE).get("weight_map", {}).values())
    files = tuple(path / name for name in sorted(shards)) or (path / SINGLE_FILE,)
    for file in files:
        if not file.is_file():
            raise ChangeSomething(
                "model", path, f"its weight file {file.name} is missing", "fetch the model again"
            )
    return files


def check_weight_file(file: Path) -> None:
    """Make sure that a safetensors file is as long as its header says.

    :raises ChangeSomething: naming the file.
    """
    try:
        expected = _expected_bytes(file)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(file, "its header is damaged") from error
    actual = file.stat().st_size
    if actual != expected:
        raise _corrupt(file, f"it has {actual} bytes instead of {expected}")


def load_module(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A transformers causal LM with its weights in the given dtype on the device.

    :raises ChangeSomething: if a file is damaged or tensors are missing or misshapen.
    """
    for file in weight_files(path):
        check_weight_file(file)
    transformers_logging.disable_progress_bar()
    try:
        module, report = auto_class(config).from_pretrained(
            path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (SafetensorError, RuntimeError, ImportError, *MALFORMED) as error:
        reason = " ".join(str(error).split())[:200]
        raise ChangeSomething(
            "model", path, f"its weights do not load ({reason})", "fetch the model again"
        ) from error
    _require_all(path, report["missing_keys"])
    return module.to(device)


def auto_class(config: Any) -> Any:
    """The class of transformers that makes a config's model with a head that writes text."""
    takes_images = class_run(config) in WITH_IMAGES
    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _expected_bytes(file: Path) -> int:
    """Length of a safetensors file by its header: 8 bytes of length, JSON, then the data."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise ValueError("impossible header length")
        header: dict[str, Any] = json.loads(stream.read(header_bytes))
    tensors = (entry for name, entry in header.items() if name != "__metadata__")
    return 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors), default=0)


def _require_all(path: Path, missing: Iterable[str]) -> None:
    """transformers would fill missing tensors with random numbers; we do not."""
    names = sorted(missing)
    if names:
        problem = f"its weights lack {len(names)} tensors, such as {names[0]}"
        raise ChangeSomething("model", path, problem, "fetch the model again")


def _corrupt(file: Path, problem: str) -> ChangeSomething:
    return ChangeSomething(
        "model", file, f"the weight file is corrupt: {problem}", "fetch the file again"
    )
