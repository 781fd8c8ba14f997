"""A GGUF file's own int4 and int8 blocks, by the names of transformers' weights.

A converted model is plain float32. When first needed, the original rows of bytes of its numbers are
stored next to it, in transformers' row order (some weights are permuted). Rows are matched by the
numbers themselves, so no family is named here, and a weight with blocks has exactly the blocks'
values.

    Q8_0: scale, 32 signed bytes
    Q4_0: scale, 32 × 4 bits, where 8 means zero
    Q4_1: scale, minimum, 32 × 4 bits

Source: ggml's formats; the library ``gguf`` unpacks them to compare.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvell.models.config.json_files import read_by_library
from kvell.models.fused.grouped import GROUP, MOST_EIGHT, GroupedWeight
from kvell.models.loading.weight_files import check_weight_file, weight_files
from kvell.models.sources.packaged import MARKER, gguf_file
from kvell.wire.decoding import decode

BLOCKS_FILE = "gguf-blocks.safetensors"
TYPES = ("Q4_0", "Q4_1", "Q8_0")
_BLOCK_TYPES = msgspec.json.Decoder(dict[str, Literal["Q4_0", "Q4_1", "Q8_0"]])
HALF_BYTES = 2
"""Size of a scale or minimum."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a GGUF file.

    :param rows: uint8 [out, bytes of a row's blocks].
    :param places: index of each row, by the digest of its numbers.
    """

    kind: str
    rows: npt.NDArray[np.uint8]
    places: Mapping[bytes, int]


def blocks_of(path: Path) -> dict[str, GroupedWeight]:
    """Return the blocks of a model directory, by the names of its weights; may be empty.

    A converted model's blocks are taken from its source the first time.
    """
    file = path / BLOCKS_FILE
    if not file.is_file() and (path / MARKER).is_file():
        write_blocks(gguf_file(), path)
    if not file.is_file():
        return {}
    check_weight_file(file)
    with read_by_library(file, "is not a file of blocks", "remove it"):
        with safe_open(file, "pt") as stored:
            types = decode(_BLOCK_TYPES, stored.metadata()["types"].encode())
            rows = {name: stored.get_tensor(name) for name in types}
        weights = {name: read_rows(rows[name], kind) for name, kind in types.items()}
    return {name: weight for name, weight in weights.items() if _is_served(weight)}


def write_blocks(source: Path, path: Path) -> None:
    """Store the blocks of a GGUF file in the model directory that was converted from it."""
    tensors = _tensors_of(source)
    blocks: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for file in weight_files(path):
        with safe_open(file, "np") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                digests = _digests(weights.get_tensor(name))
                tensor = _source_of(digests, tensors)
                if tensor is not None:
                    rows = tensor.rows[[tensor.places[digest] for digest in digests]]
                    blocks[name] = torch.from_numpy(rows)
                    types[name] = tensor.kind
    partial = path / f"{BLOCKS_FILE}.partial-{os.getpid()}"
    save_file(blocks, partial, {"types": json.dumps(types)})
    partial.rename(path / BLOCKS_FILE)


def read_rows(rows: torch.Tensor, kind: str) -> GroupedWeight:
    """Decode a weight from its rows of bytes.

    :param rows: uint8 [out, bytes of a row's blocks].
    :param kind: one of ``TYPES``.
    """
    halves = 2 if kind == "Q4_1" else 1
    quants_bytes = GROUP if kind == "Q8_0" else GROUP // 2
    blocks = rows.view(rows.shape[0], -1, halves * HALF_BYTES + quants_bytes)
    scales = _half(blocks, 0)
    quants = blocks[..., halves * HALF_BYTES :].contiguous()
    if kind == "Q8_0":
        return GroupedWeight(quants.view(torch.int8).flatten(1), scales, None)
    minima = _half(blocks, 1) if kind == "Q4_1" else (-8 * scales.float()).half()
    return GroupedWeight(torch.cat([quants & 15, quants >> 4], -1).flatten(1), scales, minima)


def _is_served(weight: GroupedWeight) -> bool:
    """Return whether kernels can multiply it: they take an int8's magnitude, and -128 has none."""
    return weight.minima is not None or int(weight.quants.min()) >= -MOST_EIGHT


def _half(blocks: torch.Tensor, index: int) -> torch.Tensor:
    part = blocks[..., index * HALF_BYTES : (index + 1) * HALF_BYTES]
    return part.contiguous().view(torch.float16)[..., 0]


def _tensors_of(source: Path) -> list[_Tensor]:
    from gguf import GGUFReader, dequantize

    made = []
    for tensor in GGUFReader(source).tensors:
        if tensor.tensor_type.name in TYPES and tensor.data.ndim == 2:
            digests = _digests(dequantize(tensor.data, tensor.tensor_type))
            places = {digest: row for row, digest in enumerate(digests)}
            made.append(_Tensor(tensor.tensor_type.name, np.asarray(tensor.data), places))
    return made


def _source_of(digests: Sequence[bytes], tensors: Sequence[_Tensor]) -> _Tensor | None:
    """Return the tensor that all rows of a weight come from; None if there is none."""
    for tensor in tensors:
        same_size = len(digests) == len(tensor.rows)
        if same_size and all(digest in tensor.places for digest in digests):
            return tensor
    return None


def _digests(numbers: npt.NDArray[np.float32]) -> list[bytes]:
    """Return a digest of each row of a float32 matrix; none for other arrays."""
    if numbers.ndim != 2 or numbers.dtype != np.float32:
        return []
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in numbers]
