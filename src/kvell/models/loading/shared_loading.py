"""Choice of the memory for a model's weights, and the move of a module's parameters there."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_memory import PrivateWeights, WeightMemory

ALIGN_BYTES = 128


@contextmanager
def memory_for(
    shared: SharedWeights | None,
    files: Sequence[Path],
    kernels: AttentionKernels,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool,
    quantization: str,
) -> Iterator[WeightMemory]:
    """Yield the memory for the weights of a model that is loaded in the block.

    :param shared: a file that other processes map too; not used on a GPU.
    """
    if shared is None or device.type != "cpu":
        yield PrivateWeights()
        return
    stats = {str(file.resolve()): file.stat() for file in files}
    key = {
        "version": version("kvell"),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "dtype": str(dtype),
        "quantization": quantization,
        "kernels": [kernels.name, getattr(kernels, "instruction_set", "")],
        "fused": fused,
    }
    with shared.memory_of(json.dumps(key, sort_keys=True)) as memory:
        yield memory


def share_parameters(module: Any, memory: WeightMemory) -> None:
    """Move a module's parameters into shared memory, which becomes read-only.

    Parameters that transformers left in their file's mapping stay there: processes share the
    system's copy of a file. Buffers stay the module's own: some modules write to theirs. Nothing
    happens if the memory is private.
    """
    if not memory.is_shared:
        return
    files = mapped_files()
    moved = {
        name: values
        for name, values in module.named_parameters()
        if values.is_cpu
        and values.is_contiguous()
        and values.nbytes > 0
        and not any(values.data_ptr() in file for file in files)
    }
    if not moved:
        return
    shapes = [(name, tuple(values.shape), str(values.dtype)) for name, values in moved.items()]
    text = hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
    sizes_bytes = [-(-values.nbytes // ALIGN_BYTES) * ALIGN_BYTES for values in moved.values()]
    piece = memory.take(f"parameters {text}", sum(sizes_bytes))
    flat = torch.frombuffer(piece.memory, dtype=torch.uint8)
    at = 0
    for values, size_bytes in zip(moved.values(), sizes_bytes, strict=True):
        view = flat[at : at + values.nbytes].view(values.dtype).view(values.shape)
        if not piece.is_filled:
            view.copy_(values.detach())
        values.data = view
        at = at + size_bytes


def mapped_files() -> list[range]:
    """Return the addresses at which files of a file system are mapped into this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/") and not name[0].startswith("/memfd:"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append(range(start, end))
    return ranges
