"""The weights of a GGUF file by transformers' names, in blocks.

llama.cpp rotates neighbouring numbers of a head, so its converter changes the order of the rows of
queries and keys in some families; they are put back. It also stores Gemma's norms with the one that
the model adds, and the decays of states instead of their logarithms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from kvell.models.config.stored_tensors import StoredTensor
from kvell.models.fused.grouped import BlockWeight
from kvell.models.gguf.gguf_file import GgufFile, read_gguf
from kvell.models.gguf.gguf_tensors import (
    Bytes,
    config_from,
    map_file,
    tensors_of,
    types_line,
)
from kvell.models.loading.block_forms import PLAIN_TYPES, Order, row_blocks
from kvell.models.loading.weight_files import WeightMap
from kvell.models.sources.converted import MARKER
from kvell.models.sources.gguf_directory import gguf_source
from kvell.models.sources.packaged import gguf_file

_PERMUTED = frozenset({"granite", "llama", "smollm3"})
_CONVOLUTIONS = (".conv1d.weight", ".conv.conv.weight")


@dataclass(frozen=True)
class GgufWeights(WeightMap):
    """A GGUF file's tensors by transformers' names.

    :param config: the fields of the model's config.
    """

    architecture: str = ""
    config: Mapping[str, object] = field(default_factory=dict)

    @override
    def blocks(self) -> dict[str, BlockWeight]:
        made = {}
        for name, tensor, data in self._places():
            if _is_in_blocks(tensor):
                rows = data.reshape(tensor.shape[0], -1)
                made[name] = row_blocks(rows, tensor.dtype, self._order(name, tensor))
        return made

    @override
    def stored_as(self, form: str) -> str:
        return types_line(self.stored, form)

    @override
    def map_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._tensor(name, tensor, data) for name, tensor, data in self._places()}

    def _places(self) -> Iterator[tuple[str, StoredTensor, Bytes]]:
        """Yield each tensor by its name, with its bytes in its file's mapping."""
        files = {file: map_file(file) for file in self.files}
        for name, tensor in self.stored.items():
            yield name, tensor, files[self.file_of[name]][tensor.start : tensor.stop]

    def _tensor(self, name: str, tensor: StoredTensor, data: Bytes) -> torch.Tensor:
        if _is_in_blocks(tensor):
            return torch.zeros(1).expand(tensor.shape)
        dtype = PLAIN_TYPES[tensor.dtype]
        made = torch.from_numpy(data).view(dtype).view(tensor.shape)
        order = self._order(name, tensor)
        if order is not None:
            made = made[torch.from_numpy(order)]
        if name.endswith(_CONVOLUTIONS):
            return made[:, None]
        if name.endswith("A_log"):
            made = (-made).log()
        elif self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            made = made - 1
        return made.flatten() if ".mamba." in name and not name.endswith("_proj.weight") else made

    def _order(self, name: str, tensor: StoredTensor) -> Order | None:
        """Return the places of a weight's or bias's rows in the file; None for the same."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        count = self.config[heads[part]] if (part := name.split(".")[-2]) in heads else None
        if count is None or self.architecture not in _PERMUTED:
            return None
        places = np.arange(tensor.shape[0], dtype=np.int64)
        return places.reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)  # type: ignore[call-overload, no-any-return]


def weights_in(path: Path, header: GgufFile) -> GgufWeights:
    """Return the weights of a GGUF file.

    :param path: directory of the model's config and tokenizer.
    :raises ChangeSomething: if the file has a tensor or type that is not read.
    """
    config = config_from(header)
    tensors = tensors_of(header, config)
    file_of = {name: tensor.file for name, tensor in tensors.items()}
    architecture = str(header.metadata["general.architecture"])
    return GgufWeights(path, None, header.files, file_of, tensors, {}, architecture, config)


def packaged_blocks(weights: WeightMap) -> dict[str, BlockWeight]:
    """Return the blocks of the packaged file of which a directory has the numbers; may be empty."""
    if not (weights.path / MARKER).is_file() or gguf_source(weights.path) is not None:
        return {}
    tensors = weights.map_tensors()
    blocks = weights_in(weights.path, read_gguf(gguf_file())).blocks()
    return {name: block for name, block in blocks.items() if _is_of(tensors.get(name), block)}


def _is_of(numbers: torch.Tensor | None, block: BlockWeight) -> bool:
    """Return whether a weight has a block's shape, and its numbers in the first and last row."""
    if numbers is None or tuple(numbers.shape) != block.shape:
        return False
    last = block.shape[0] - 1
    return all(
        torch.equal(numbers[row : row + 1], block.numbers(row, row + 1)) for row in (0, last)
    )


def _is_in_blocks(tensor: StoredTensor) -> bool:
    return tensor.dtype not in PLAIN_TYPES
