"""The tensors of a model directory, and the one file that each is read from.

Every reader of weights takes its tensors from here, so that all passes read the same::

    model.safetensors.index.json assigns tensors to files ─┐
    model.safetensors, if there is no index ───────────────┼─► checked headers ─► WeightMap
    model-00001-of-00002.safetensors …, without either ────┘

Other files of the directory, and tensors under names that the index gives to another file, are not
the model's. Files are checked by their headers alone, so that an interrupted download is reported
in one line instead of failing somewhere inside a library.

The header of a safetensors file is checked before any library maps the file::

    header length, u64 | header, JSON | data
                         name → dtype, shape, first and last byte in the data

Each entry is decoded as the types that it must have and checked against the others and the size of
the file. A damaged header thus costs little more memory than its bytes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from safetensors import SafetensorError, safe_open

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import (
    FETCH_AGAIN,
    FETCH_MODEL_AGAIN,
    file_bytes,
    not_the_file,
    one_line,
)
from kvell.models.config.stored_tensors import StoredTensor
from kvell.wire.decoding import MalformedError, decode

if TYPE_CHECKING:
    import torch

    from kvell.models.fused.grouped import BlockWeight

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 20
MOST_TENSORS = 1 << 17
COLONS_OF_A_TENSOR = 4
MOST_DIMENSIONS = 64
METADATA = "__metadata__"
SHOWN_CHARS = 80
"""The most characters of a tensor's name in an error."""
BITS = (
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8"), 8)
    | dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8)
    | dict.fromkeys(("U16", "I16", "F16", "BF16"), 16)
    | dict.fromkeys(("U32", "I32", "F32"), 32)
    | dict.fromkeys(("U64", "I64", "F64", "C64"), 64)
)
"""Bits of an element of each dtype of safetensors."""

Size = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=MOST_DIMENSIONS)]
    data_offsets: tuple[Size, Size]


_ENTRIES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str] | None)


def read_header(file: Path) -> list[StoredTensor]:
    """Return a file's tensors in the order of their data.

    They fill the data, one after the other, each by its shape and dtype.

    :raises MalformedError: with the problem.
    """
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 2 <= header_bytes <= MAX_HEADER_BYTES:
            raise MalformedError(f"its header is damaged: a length of {header_bytes} bytes")
        header = stream.read(header_bytes)
    if len(header) < header_bytes:
        problem = f"it has {len(header)} of its {header_bytes} bytes"
        raise MalformedError(f"its header is damaged: {problem}")
    if header.count(b":") > COLONS_OF_A_TENSOR * MOST_TENSORS:
        raise MalformedError(f"its header names more than {MOST_TENSORS} tensors")
    try:
        tensors = _tensors(decode(_ENTRIES, header, "header"))
    except MalformedError as error:
        raise MalformedError(f"its header is damaged: {error}") from error
    end = 0
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    for tensor in tensors:
        if tensor.start != end:
            begins = f"begins at byte {tensor.start} of the data instead of {end}"
            raise MalformedError(f"its header is damaged: tensor {_shown(tensor.name)} {begins}")
        end = tensor.stop
    if (expected := LENGTH_BYTES + header_bytes + end) != size_bytes:
        raise MalformedError(f"it has {size_bytes} bytes instead of {expected}")
    return tensors


def _tensors(entries: dict[str, msgspec.Raw]) -> list[StoredTensor]:
    """Return the tensors that a header names.

    :raises MalformedError: if an entry is malformed, or its length is not that of its shape.
    """
    metadata = bytes(entries.pop(METADATA, b"null"))
    if len(metadata) > MAX_METADATA_BYTES:
        raise MalformedError(f"its metadata has more than {MAX_METADATA_BYTES} bytes")
    decode(_METADATA, metadata, METADATA)
    tensors = []
    for name, raw in entries.items():
        entry = decode(_ENTRY, bytes(raw), f"tensor {_shown(name)}")
        bits = BITS.get(entry.dtype)
        if bits is None:
            problem = f"has the unknown dtype {entry.dtype[:SHOWN_CHARS]!r}"
            raise MalformedError(f"tensor {_shown(name)} {problem}")
        start, stop = entry.data_offsets
        if 8 * (stop - start) != bits * math.prod(entry.shape):
            problem = f"has {stop - start} bytes, which is not {entry.dtype} {entry.shape}"
            raise MalformedError(f"tensor {_shown(name)} {problem[: 2 * SHOWN_CHARS]}")
        tensors.append(StoredTensor(name, entry.dtype, tuple(entry.shape), start, stop))
    return tensors


def _shown(name: str) -> str:
    return repr(name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "…")


INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_INDEX_BYTES = 32 << 20
LONGEST_NAME = 255
"""The longest name of a file in bytes, on all common file systems."""
SHOWN_NAME = 120
"""The most characters of a tensor's name in an error."""
SHARD = re.compile(r"(model(?:\.safetensors)?)-(\d{1,6})-of-(\d{1,6})\.safetensors")
"""Names of transformers' shards: a set's name, the number in the set, and the set's size."""
INSTEAD = (
    ("*.bin", "is a pickle, which is not read", "fetch or make its safetensors"),
    ("*.pth", "is a pickle, which is not read", "fetch or make its safetensors"),
    ("*.gguf", "is a GGUF file", "name the file itself as the model"),
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


@dataclass(frozen=True)
class WeightMap:
    """A model directory's tensors by name, each with its file.

    :ivar index: the index that assigns them; None without one.
    :ivar unassigned: files of tensors that are stored, but under a name that the index lacks.
    """

    path: Path
    index: Path | None
    files: tuple[Path, ...]
    file_of: Mapping[str, Path]
    stored: Mapping[str, StoredTensor]
    unassigned: Mapping[str, Path]

    @property
    def sources(self) -> tuple[Path, ...]:
        return self.files if self.index is None else (self.index, *self.files)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.stored.values())

    def blocks(self) -> "dict[str, BlockWeight]":
        """Return the weights that the files have in blocks, by the names of transformers."""
        return {}

    def stored_as(self, form: str) -> str:
        """Return what the files have in blocks, and the form that it is read into; "" for none."""
        return ""

    def map_tensors(self) -> "dict[str, torch.Tensor]":
        """Map all tensors, in their files' dtypes, without reading them.

        A weight in blocks has a tensor of its shape without numbers.

        :raises ChangeSomething: naming a file whose tensors torch cannot map.
        """
        names_of: dict[Path, list[str]] = defaultdict(list)
        for name, file in self.file_of.items():
            names_of[file].append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, names in names_of.items():
            try:
                with safe_open(file, "pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in names}
            except (SafetensorError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise _corrupt(file, one_line(error)) from error
        return tensors

    def refuse_missing(self, names: Sequence[str]) -> None:
        """Refuse a model whose weights lack tensors; nothing happens if there are none.

        :raises ChangeSomething: naming the first.
        """
        if not names:
            return
        problem = f"its weights lack {len(names)} tensors, such as {names[0][:SHOWN_NAME]}"
        if file := self.unassigned.get(names[0]):
            problem = f"{problem}: {file.name} has it, but {INDEX_FILE} does not name it"
        raise ChangeSomething("model", self.path, problem, FETCH_MODEL_AGAIN)


def read_weight_map(path: Path) -> WeightMap:
    """Read the index and the headers of a model directory's weight files.

    :raises ChangeSomething: naming a file that is missing or damaged, or a tensor that is not in
        the file that the index gives, or in two files without an index.
    """
    index = path / INDEX_FILE
    assigned = _assigned(index)
    if not assigned:
        return _unindexed(path)
    names = sorted(set(assigned.values()))
    for name in names:
        if not _is_file_name(name):
            problem = f"its weight_map names {name[:LONGEST_NAME]!r}, which is no file beside it"
            raise _index_fault(index, problem)
    files = tuple(path / name for name in names)
    for file in files:
        if not file.is_file():
            raise _missing(path, file)
    headers = {file.name: {t.name: t for t in check_weight_file(file)} for file in files}
    for name, file_name in assigned.items():
        if name not in headers[file_name]:
            lacks = f"its weight_map names {name[:SHOWN_NAME]!r} in {file_name}, which lacks it"
            raise _index_fault(index, lacks)
    return WeightMap(
        path,
        index,
        files,
        {name: path / file_name for name, file_name in assigned.items()},
        {name: headers[file_name][name] for name, file_name in assigned.items()},
        {
            name: path / file_name
            for file_name, tensors in headers.items()
            for name in tensors.keys() - assigned.keys()
        },
    )


def check_weight_file(file: Path) -> list[StoredTensor]:
    """Return the tensors of a safetensors file that is as long as its header requires.

    :raises ChangeSomething: naming the file.
    """
    with file.open("rb") as stream:
        if fault := not_the_file(stream.read(64)):
            raise ChangeSomething("model", file, fault, FETCH_AGAIN)
    try:
        return read_header(file)
    except MalformedError as error:
        raise _corrupt(file, one_line(error)) from error


def _unindexed(path: Path) -> WeightMap:
    """Return the tensors of a directory without an index: of the single file, else of all shards.

    :raises ChangeSomething: if a file is missing or damaged, or if two have the same tensor.
    """
    single = path / SINGLE_FILE
    files = (single,) if single.is_file() else _shards(path)
    file_of: dict[str, Path] = {}
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in check_weight_file(file):
            if other := file_of.get(tensor.name):
                places = f"{other.name} and {file.name}"
                problem = f"its tensor {tensor.name[:SHOWN_NAME]!r} is in {places}"
                remedy = f"fetch {INDEX_FILE}, which says which one counts"
                raise ChangeSomething("model", path, problem, remedy)
            file_of[tensor.name] = file
            stored[tensor.name] = tensor
    return WeightMap(path, None, files, file_of, stored, {})


def _shards(path: Path) -> tuple[Path, ...]:
    """Return all files of the one set of shards in a directory, in order.

    :raises ChangeSomething: if there is no set, or several, or if one lacks a file.
    """
    sets: dict[tuple[str, str], dict[int, Path]] = defaultdict(dict)
    for file in sorted(path.glob("*.safetensors")):
        if (match := SHARD.fullmatch(file.name)) and int(match[3]):
            name, number, count = match.groups()
            sets[name, count][int(number)] = file
    if not sets:
        raise _missing(path, path / SINGLE_FILE)
    (name, count), *others = sets
    if others:
        both = " and ".join(f"{name}-…-of-{count}" for name, count in sorted(sets)[:2])
        problem = f"it has several sets of weight files ({both}), and {INDEX_FILE} is missing"
        raise ChangeSomething("model", path, problem, "fetch the index")
    shards = sets[name, count]
    first = 0 if 0 in shards else 1
    files = []
    for number in range(first, int(count) + first):
        name_of = f"{name}-{number:0{len(count)}}-of-{count}.safetensors"
        files.append(shards.get(number, path / name_of))
        if not files[-1].is_file():
            raise _missing(path, files[-1])
    return tuple(files)


def _assigned(index: Path) -> Mapping[str, str]:
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
        raise _index_fault(index, problem) from error


def _index_fault(index: Path, problem: str) -> ChangeSomething:
    return ChangeSomething("model", index, problem, FETCH_AGAIN)


def _is_file_name(name: str) -> bool:
    is_plain = name not in ("", ".", "..") and name.isprintable() and "/" not in name
    return is_plain and len(name.encode()) <= LONGEST_NAME


def _missing(path: Path, file: Path) -> ChangeSomething:
    if file.is_symlink():
        problem = f"its weight file {file.name} is a link to {file.readlink()}, which is missing"
        return ChangeSomething("model", path, problem, FETCH_MODEL_AGAIN)
    problem = f"its weight file {file.name} is missing"
    if file.name == SINGLE_FILE:
        for pattern, what, instead in INSTEAD:
            if files := sorted(path.glob(pattern)):
                return ChangeSomething("model", path, f"{problem}; {files[0].name} {what}", instead)
    return ChangeSomething("model", path, problem, FETCH_MODEL_AGAIN)


def _corrupt(file: Path, problem: str) -> ChangeSomething:
    return ChangeSomething(
        "model", file, f"the weight file is corrupt: {problem}", "fetch the file again"
    )
