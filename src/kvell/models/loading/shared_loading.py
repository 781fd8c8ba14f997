"""Choice of the memory for a model's weights, and the move of a module's parameters there."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import kvell.models
from kvell.attention.interface import AttentionKernels
from kvell.device.shared_weights import SharedWeights
from kvell.device.weight_cache import CachedMemory, WeightCache
from kvell.device.weight_memory import PrivateWeights, WeightMemory

ALIGN_BYTES = 128


@contextmanager
def memory_for(
    shared: SharedWeights | None,
    cache: WeightCache | None,
    files: Sequence[Path],
    config: object,
    kernels: AttentionKernels,
    dtype: torch.dtype,
    device: torch.device,
    fused: bool,
    quantization: str,
) -> Iterator[WeightMemory]:
    """Yield the memory for the weights of a model that is loaded in the block.

    :param shared: a file that other processes map too; not used on a GPU.
    :param cache: packed weights of earlier starts; not used on a GPU.
    :param files: the model's weights.
    """
    if device.type != "cpu" or (shared is None and cache is None):
        yield PrivateWeights()
        return
    folders = [Path(folder) for folder in kvell.models.__path__]
    code = [file for folder in folders for kind in ("*.py", "*.so") for file in folder.rglob(kind)]
    fields = {
        "version": version("kvell"),
        "code": _digest(_identities(code)),
        "files": _identities(files),
        "config": _digest(config),
        "dtype": str(dtype),
        "quantization": quantization,
        "kernels": [kernels.name, getattr(kernels, "instruction_set", "")],
        "fused": fused,
    }
    key = json.dumps(fields, sort_keys=True)
    with ExitStack() as stack:
        memory: WeightMemory = PrivateWeights()
        if shared is not None:
            memory = stack.enter_context(shared.memory_of(key))
        if cache is not None:
            memory = stack.enter_context(cache.memory_of(key, memory))
        yield memory


def _identities(files: Sequence[Path]) -> dict[str, list[int]]:
    stats = {str(file.resolve()): file.stat() for file in sorted(files)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def _digest(facts: object) -> str:
    text = repr(facts).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def share_parameters(module: Any, memory: WeightMemory) -> None:
    """Move a module's parameters into shared memory, which becomes read-only.

    Parameters that transformers left in their file's mapping stay there: processes share the
    system's copy of a file. Buffers stay the module's own: some modules write to theirs. Nothing
    happens if the memory is private.
    """
    if not memory.is_shared:
        return
    if isinstance(memory, CachedMemory):
        memory = memory.uncached  # the module was read already
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
    sizes_bytes = [-(-values.nbytes // ALIGN_BYTES) * ALIGN_BYTES for values in moved.values()]
    piece = memory.take(f"parameters {_digest(shapes)}", sum(sizes_bytes))
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
