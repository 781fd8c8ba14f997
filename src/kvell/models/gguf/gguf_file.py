"""Strict reading of a GGUF file's header, and of all files of a split model.

::

    GGUF, version, counts │ metadata: key, type, value │ tensors: name, sizes, type, offset │ data

Every count and length is checked against the bytes that are left before anything is allocated, so
that a damaged header costs no more memory than its file. Strings in arrays (a vocabulary) are
passed over: the tokenizer's reader reads them.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kvell.errors import ChangeSomething
from kvell.models.config.json_files import FETCH_AGAIN, not_the_file
from kvell.models.config.stored_tensors import StoredTensor
from kvell.wire.decoding import MalformedError

Value = bool | int | float | str | list[int] | list[float] | list[bool]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_TENSORS = 1 << 15
MOST_KEYS = 1 << 14
MOST_TEXT_BYTES = 1 << 23
LONGEST_NAME_BYTES = 255
MOST_DIMENSIONS = 4
LONGEST_ARRAY = 1 << 12
"""The most numbers of an array that is kept; longer ones belong to the tokenizer."""
MOST_NUMBERS = 1 << 20
"""The most numbers of all arrays together that are kept."""
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT_BYTES = 32
STRING, ARRAY = 8, 9
FORMATS = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
"""Formats of single values by GGUF's number of their type."""
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A tensor's place in a file; its dtype is its type in GGUF, such as ``Q4_K``."""

    file: Path


@dataclass(frozen=True)
class GgufFile:
    """The header of a model: of one file, or of all parts of a split one.

    :param metadata: keys and values of the first file, without arrays of strings.
    :param counts: lengths of all arrays of the metadata.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    counts: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]


def read_gguf(file: Path) -> GgufFile:
    """Read the header of a model; a split model may be named by any of its parts.

    :raises ChangeSomething: naming a file that is damaged, cut or missing.
    """
    match = PART.fullmatch(file.name)
    first = file
    if match is not None:
        first = file.with_name(f"{match['name']}-00001-of-{match['count']}.gguf")
    made = _read_part(first)
    count = made.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2:
        return made
    match = PART.fullmatch(first.name)
    if match is None or int(match["count"]) != count:
        problem = f"is a part of {count} whose name does not end in -00001-of-{count:05}.gguf"
        raise ChangeSomething("model", first, problem, "give the parts their own names")
    tensors = dict(made.tensors)
    files = [first]
    for number in range(2, count + 1):
        part = _read_part(first.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf"))
        if part.metadata.get("split.no") != number - 1:
            problem = f"is not part {number} of {count}"
            raise ChangeSomething("model", part.files[0], problem, FETCH_AGAIN)
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            problem = f"has the tensor {twice[0]!r}, which another part has too"
            raise ChangeSomething("model", part.files[0], problem, FETCH_AGAIN)
        tensors |= part.tensors
        files += part.files
    said = made.metadata.get("split.tensors.count", len(tensors))
    if said != len(tensors):
        problem = f"its parts have {len(tensors)} tensors instead of {said}"
        raise ChangeSomething("model", first, problem, "fetch all parts again")
    return replace(made, files=tuple(files), tensors=MappingProxyType(tensors))


def _read_part(file: Path) -> GgufFile:
    try:
        with file.open("rb") as stream:
            if fault := not_the_file(stream.read(64)):
                raise ChangeSomething("model", file, fault, FETCH_AGAIN)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(file, data).parse()
    except FileNotFoundError as error:
        problem = "is missing"
        raise ChangeSomething("model", file, problem, "fetch all parts of the model") from error
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ChangeSomething("model", file, problem, "make it readable") from error
    except MalformedError as error:
        raise ChangeSomething("model", file, str(error), FETCH_AGAIN) from error


class _Header:
    """The bytes of a header, read from front to back."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._at = 0
        self._text_bytes = MOST_TEXT_BYTES
        self._numbers = MOST_NUMBERS

    def parse(self) -> GgufFile:
        """Read metadata and the table of tensors.

        :raises MalformedError: with the problem.
        """
        if self._data[:4] != MAGIC:
            raise MalformedError("is not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in VERSIONS:
            big = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            what = "is for big-endian machines" if big in VERSIONS else f"has version {version}"
            raise MalformedError(f"{what}; versions 2 and 3 of little-endian machines are read")
        tensor_count = self._count("tensors", MOST_TENSORS)
        key_count = self._count("keys", MOST_KEYS)
        metadata: dict[str, Value] = {}
        counts: dict[str, int] = {}
        for _ in range(key_count):
            key = self._text("a key", LONGEST_NAME_BYTES)
            if key in metadata or key in counts:
                raise MalformedError(f"its header is damaged: it has the key {key!r} twice")
            value, count = self._value(key)
            if count is not None:
                counts[key] = count
            if value is not None:
                metadata[key] = value
        rows = [self._row() for _ in range(tensor_count)]
        tensors = self._places(rows, _alignment_bytes(metadata))
        return GgufFile((self._file,), MappingProxyType(metadata), counts, tensors)

    def _row(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, sizes, type and offset in the data."""
        name = self._text("a tensor's name", LONGEST_NAME_BYTES)
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise MalformedError(f"its tensor {name!r} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(sizes)), self._number("I"), self._number("Q")

    def _places(
        self, rows: list[tuple[str, tuple[int, ...], int, int]], alignment_bytes: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors; each lies in the file, aligned, and overlaps no other."""
        begin = -(-self._at // alignment_bytes) * alignment_bytes
        made: dict[str, GgufTensor] = {}
        for name, shape, type_number, offset in rows:
            kind, size_bytes = _type_of(name, shape, type_number)
            if offset % alignment_bytes:
                raise MalformedError(f"its tensor {name!r} is not aligned")
            if begin + offset + size_bytes > len(self._data):
                lacks = begin + offset + size_bytes - len(self._data)
                raise MalformedError(f"is cut: its tensor {name!r} lacks {lacks} bytes")
            if name in made:
                raise MalformedError(f"its header is damaged: it has the tensor {name!r} twice")
            start = begin + offset
            made[name] = GgufTensor(name, kind, shape, start, start + size_bytes, self._file)
        end = 0
        for tensor in sorted(made.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise MalformedError(f"its tensor {tensor.name!r} overlaps another")
            end = tensor.stop
        return made

    def _value(self, key: str) -> tuple[Value | None, int | None]:
        """Return a value, None for strings of an array, and the length of an array."""
        type_number = self._number("I")
        if type_number == STRING:
            text = self._text(key, self._text_bytes)
            self._text_bytes -= len(text)
            return text, None
        if type_number != ARRAY:
            return self._single(key, type_number), None
        inner = self._number("I")
        if inner == STRING:
            count = self._count(key, (len(self._data) - self._at) // 8)
            self._skip_texts(count)
            return None, count
        size_bytes = struct.calcsize(_format(key, inner))
        count = self._count(key, (len(self._data) - self._at) // size_bytes)
        if count > LONGEST_ARRAY:
            self._skip(count * size_bytes)
            return None, count
        self._numbers -= count
        if self._numbers < 0:
            raise MalformedError(f"its header is damaged: {MOST_NUMBERS} numbers are not enough")
        numbers = struct.unpack_from(f"<{count}{_format(key, inner)}", self._data, self._at)
        self._skip(count * size_bytes)
        return list(numbers), count

    def _single(self, key: str, type_number: int) -> int | float | bool:
        form = _format(key, type_number)
        [value] = struct.unpack("<" + form, self._taken(struct.calcsize(form)))
        made: int | float | bool = value
        return made

    def _number(self, form: str) -> int:
        [value] = struct.unpack("<" + form, self._taken(struct.calcsize(form)))
        return int(value)

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise MalformedError(f"its header is damaged: it says {count} {what[:80]}")
        return count

    def _text(self, what: str, longest_bytes: int) -> str:
        length = self._number("Q")
        if length > longest_bytes:
            raise MalformedError(f"its header is damaged: {what[:80]} of {length} bytes")
        try:
            return self._taken(length).decode()
        except UnicodeDecodeError as error:
            raise MalformedError(f"its header is damaged: {what[:80]} is not UTF-8") from error

    def _taken(self, length: int) -> bytes:
        start = self._at
        self._skip(length)
        return self._data[start : self._at]

    def _skip_texts(self, count: int) -> None:
        """Pass over strings; a vocabulary has hundreds of thousands."""
        at = self._at
        end = len(self._data) - 8
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > end:
                break
            at += 8 + length_at(self._data, at)[0]
        self._skip(at - self._at)

    def _skip(self, length: int) -> None:
        if length > len(self._data) - self._at:
            raise MalformedError(f"is cut: its header goes on after its {len(self._data)} bytes")
        self._at += length


def _format(key: str, type_number: int) -> str:
    if type_number not in FORMATS:
        raise MalformedError(f"its header is damaged: {key!r} has type {type_number}")
    return FORMATS[type_number]


def _alignment_bytes(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment not in {1 << bits for bits in range(3, 17)}:
        raise MalformedError(f"its header is damaged: {ALIGNMENT} is {alignment!r}")
    return alignment


def _type_of(name: str, shape: tuple[int, ...], type_number: int) -> tuple[str, int]:
    """Return the name of a tensor's type and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_number)
    except ValueError as error:
        problem = f"its tensor {name!r} has the type {type_number}, which is not known"
        raise MalformedError(problem) from error
    numbers, size_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % numbers:
        sizes = list(shape)
        raise MalformedError(f"its tensor {name!r} of {kind.name} cannot have the sizes {sizes}")
    return kind.name, math.prod(shape) // numbers * size_bytes
