"""The machine, code and model that a calibration is valid for."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import kvell
from kvell.cost.calibration import MachinePrint, ModelPrint, SoftwarePrint
from kvell.device.processor import processor
from kvell.models.config.description import ModelDescription

TIMED_ROOMS = ("attention", "device", "engine", "memory.py", "models", "pages", "prefix")
"""Parts of the package whose code a step runs."""
FITTING_ROOMS = ("calibration", "cost")
"""Parts whose code makes prices of a step's times."""
DIGEST_CHARACTERS = 16


def machine_print(device: str, threads: int | None = None) -> MachinePrint:
    if device == "cuda":
        return MachinePrint(device, torch.cuda.get_device_name(), 1, ())
    chip = processor()
    cores = len(os.sched_getaffinity(0))
    return MachinePrint(device, chip.name, cores, chip.features, threads or torch.get_num_threads())


def software_print(package: Path = Path(kvell.__file__).parent) -> SoftwarePrint:
    return SoftwarePrint(kvell.__version__, str(torch.__version__), code_digest(package))


def code_digest(
    package: Path = Path(kvell.__file__).parent, rooms: Sequence[str] = TIMED_ROOMS
) -> str:
    """Return a digest of all files of some rooms, by path and content.

    :param rooms: by default those with a step's code.
    """
    digest = hashlib.sha256()
    files = [file for room in rooms for file in _files(package / room)]
    for file in sorted(files):
        digest.update(str(file.relative_to(package)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:DIGEST_CHARACTERS]


def model_print(
    name: str, dtype: str, description: ModelDescription, active_weights: int
) -> ModelPrint:
    dtype = "bfloat16" if dtype == "auto" else dtype
    contents: Any = (dtype, description, active_weights)
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:DIGEST_CHARACTERS]
    return ModelPrint(name, dtype, digest, active_weights, description.vocab_size)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for ending in ("*.py", "*.so") for file in path.rglob(ending)]
