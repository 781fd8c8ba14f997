"""Checks of the header of a safetensors file, before any library maps the file.

::

    header length, u64 | header, JSON | data
                         name → dtype, shape, first and last byte in the data

Each entry is decoded as the types that it must have and checked against the others and the size of
the file. A damaged header thus costs little more memory than its bytes.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvell.wire.decoding import MalformedError, decode

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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in the data of its file.

    :param stop: the byte after its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start


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
