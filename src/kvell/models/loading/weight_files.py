"""Discovery, checks and mapping of the safetensors files of a model directory.

Files are checked by their headers alone, so that an interrupted download is reported in one line
instead of failing somewhere inside a library.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    FETCH_AGAIN,
    file_bytes,
    not_the_file,
    one_line,
)
from kvell.models.loading.tensor_headers import check_header
from kvell.wire.decoding import MalformedError, decode

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
LONGEST_NAME = 255
"""The longest name of a file in bytes, on all common file systems."""
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


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


_INDEX = msgspec.json.Decoder(_Index)


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model directory: those of its index, or the single one.

    :raises ChangeSomething: if there are none, or if the index names one that is missing.
    """
    names = sorted(set(_placed(path / INDEX_FILE).values())) or [SINGLE_FILE]
    for name in names:
        if not _is_file_name(name):
            problem = f"its weight_map names {name[:LONGEST_NAME]!r}, which is no file beside it"
            raise ChangeSomething("model", path / INDEX_FILE, problem, FETCH_AGAIN)
    files = tuple(path / name for name in names)
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
        check_header(file)
    except MalformedError as error:
        raise _corrupt(file, one_line(error)) from error


def mapped_tensors(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Map all tensors of some files, in their files' dtypes, without reading them.

    :raises ChangeSomething: naming a file whose tensors torch cannot map.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise _corrupt(file, one_line(error)) from error
    return tensors


def _placed(index: Path) -> Mapping[str, str]:
    """Return the name of the file of each tensor, by an index; nothing if there is none."""
    if not index.is_file():
        return {}
    data = file_bytes(index, MAX_INDEX_BYTES)
    try:
        return decode(_INDEX, data).weight_map
    except MalformedError as error:
        is_json = isinstance(error.__cause__, msgspec.ValidationError)
        problem = "its weight_map does not say which file has which tensor"
        if not is_json:
            problem = f"is not valid JSON ({one_line(error)})"
        raise ChangeSomething("model", index, problem, FETCH_AGAIN) from error


def _is_file_name(name: str) -> bool:
    """Return whether a file of this name can only be in the directory that is searched for it."""
    is_plain = name not in ("", ".", "..") and name.isprintable() and "/" not in name
    return is_plain and len(name.encode()) <= LONGEST_NAME


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
