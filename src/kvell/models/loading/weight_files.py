"""Discovery, checks and mapping of the safetensors files of a model directory.

Files are checked by their headers alone, so that an interrupted download is reported in one line
instead of failing somewhere inside a library.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_AGAIN, not_the_file, read_optional_json
from kvell.wire.decoding import MalformedError, decode_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
INSTEAD = (
    (
        "model-*-of-*.safetensors",
        f"is one of several files, and {INDEX_FILE} is missing",
        "fetch it",
    ),
    ("*.bin", "is a pickle, which is not read", "fetch or make its safetensors"),
    ("*.pth", "is a pickle, which is not read", "fetch or make its safetensors"),
    ("*.gguf", "is a GGUF file, which is not read", "fetch the model's safetensors"),
    (
        "*.safetensors",
        "is not in the form of transformers",
        "fetch or make model.safetensors; transformers converts consolidated files",
    ),
)
"""Files that may replace it: pattern, problem and remedy."""


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model directory: those of its index, or the single one.

    :raises ChangeSomething: if there are none, or if the index names one that is missing.
    """
    placed = read_optional_json(path / INDEX_FILE).get("weight_map", {})
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        problem = "its weight_map does not say which file has which tensor"
        raise ChangeSomething("model", path / INDEX_FILE, problem, FETCH_AGAIN)
    files = tuple(path / name for name in sorted(set(placed.values()))) or (path / SINGLE_FILE,)
    for file in files:
        if not file.is_file():
            raise _missing(path, file)
    return files


def checked_weight_files(path: Path) -> tuple[Path, ...]:
    """Return :func:`weight_files` after checking each by its header.

    :raises ChangeSomething: naming a file that is missing or damaged.
    """
    files = weight_files(path)
    for file in files:
        check_weight_file(file)
    return files


def check_weight_file(file: Path) -> None:
    """Raise unless a safetensors file is as long as its header requires.

    :raises ChangeSomething: naming the file.
    """
    with file.open("rb") as stream:
        if fault := not_the_file(stream.read(64)):
            raise ChangeSomething("model", file, fault, FETCH_AGAIN)
    try:
        expected = _expected_bytes(file)
    except (MalformedError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _corrupt(file, "its header is damaged") from error
    actual = file.stat().st_size
    if actual != expected:
        raise _corrupt(file, f"it has {actual} bytes instead of {expected}")


def mapped_tensors(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Map all tensors of some files, in their files' dtypes, without reading them.

    :raises SafetensorError: if a file is damaged.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _expected_bytes(file: Path) -> int:
    """Return a safetensors file's length by its header: 8 bytes of length, JSON, then the data."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise ValueError("impossible header length")
        header: dict[str, Any] = decode_json(stream.read(header_bytes))
    tensors = (entry for name, entry in header.items() if name != "__metadata__")
    return 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors), default=0)


def _missing(path: Path, file: Path) -> ChangeSomething:
    """Return the error for a missing weight file, with the file that is there instead."""
    if file.is_symlink():
        problem = f"its weight file {file.name} is a link to {file.readlink()}, which is missing"
        return ChangeSomething("model", path, problem, "fetch the model again")
    problem = f"its weight file {file.name} is missing"
    remedy = "fetch the model again"
    if file.name == SINGLE_FILE:
        for pattern, what, instead in INSTEAD:
            if files := sorted(path.glob(pattern)):
                return ChangeSomething("model", path, f"{problem}; {files[0].name} {what}", instead)
    return ChangeSomething("model", path, problem, remedy)


def _corrupt(file: Path, problem: str) -> ChangeSomething:
    return ChangeSomething(
        "model", file, f"the weight file is corrupt: {problem}", "fetch the file again"
    )
