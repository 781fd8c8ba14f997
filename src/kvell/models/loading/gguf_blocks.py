"""A GGUF file's own int4 and int8 blocks, by the names of transformers' weights.

A converted model is plain float32. When first needed, the original rows of bytes of its numbers are
stored next to it, in transformers' row order (some weights are permuted). Rows are matched by the
numbers themselves, so no family is named here, and a weight with blocks has exactly the blocks'
values.
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
from kvell.models.fused.grouped import BlockWeight
from kvell.models.loading.block_forms import row_blocks
from kvell.models.loading.weight_files import WeightMap, check_weight_file
from kvell.models.sources.converted import MARKER
from kvell.models.sources.gguf_directory import gguf_source
from kvell.models.sources.packaged import gguf_file
from kvell.wire.decoding import decode

BLOCKS_FILE = "gguf-blocks.safetensors"
TYPES = ("Q4_0", "Q4_1", "Q8_0")
_BLOCK_TYPES = msgspec.json.Decoder(dict[str, Literal["Q4_0", "Q4_1", "Q8_0"]])


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a GGUF file.

    :param rows: uint8 [out, bytes of a row's blocks].
    :param places: index of each row, by the digest of its numbers.
    """

    kind: str
    rows: npt.NDArray[np.uint8]
    places: Mapping[bytes, int]


def blocks_of(weights: WeightMap) -> dict[str, BlockWeight]:
    """Return the blocks of a model directory, by the names of its weights; may be empty.

    A converted model's blocks are taken from its source the first time, and again once its weights
    have changed: blocks of other weights are not read.
    """
    file = weights.path / BLOCKS_FILE
    blocks = _read_blocks(file, weights)
    is_converted = (weights.path / MARKER).is_file() and gguf_source(weights.path) is None
    if blocks is None and is_converted:
        write_blocks(gguf_file(), weights)
        blocks = _read_blocks(file, weights)
    return blocks or {}


def _read_blocks(file: Path, weights: WeightMap) -> dict[str, BlockWeight] | None:
    """Return the blocks in a file; None if there is none, or if it has those of other weights."""
    if not file.is_file():
        return None
    check_weight_file(file)
    with read_by_library(file, "is not a file of blocks", "remove it"):
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
            if metadata.get("weights") != _fingerprint(weights):
                return None
            types = decode(_BLOCK_TYPES, metadata["types"].encode())
            rows = {name: stored.get_tensor(name) for name in types}
        return {name: row_blocks(rows[name].numpy(), kind) for name, kind in types.items()}


def write_blocks(source: Path, weights: WeightMap) -> None:
    tensors = _tensors_of(source)
    blocks: dict[str, torch.Tensor] = {}
    types: dict[str, str] = {}
    for name, numbers in weights.map_tensors().items():
        digests = _digests(numbers)
        tensor = _source_of(digests, tensors)
        if tensor is not None:
            rows = tensor.rows[[tensor.places[digest] for digest in digests]]
            blocks[name] = torch.from_numpy(rows)
            types[name] = tensor.kind
    partial = weights.path / f"{BLOCKS_FILE}.partial-{os.getpid()}"
    metadata = {"types": json.dumps(types), "weights": _fingerprint(weights)}
    save_file(blocks, partial, metadata)
    partial.rename(weights.path / BLOCKS_FILE)


def _fingerprint(weights: WeightMap) -> str:
    stats = {file.name: file.stat() for file in weights.sources}
    facts = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _tensors_of(source: Path) -> list[_Tensor]:
    from gguf import GGUFReader, dequantize

    made = []
    for tensor in GGUFReader(source).tensors:
        if tensor.tensor_type.name in TYPES and tensor.data.ndim == 2:
            numbers = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            digests = _digests(numbers)
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


def _digests(numbers: torch.Tensor) -> list[bytes]:
    """Return a digest of each row of a float32 matrix; none for other tensors."""
    if numbers.ndim != 2 or numbers.dtype != torch.float32:
        return []
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in numbers.numpy()]
