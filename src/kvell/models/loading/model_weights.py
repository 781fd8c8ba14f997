"""The weights of a model directory, whatever form its files have."""

from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.models.gguf.gguf_file import read_gguf
from kvell.models.loading.weight_files import WeightMap, read_weight_map
from kvell.models.sources.gguf_directory import gguf_source


def weights_of(path: Path) -> WeightMap:
    """Read the headers of a model's weight files.

    :raises ChangeSomething: naming a file that is missing, damaged or not read.
    """
    file = gguf_source(path)
    if file is None:
        return read_weight_map(path)
    # Imported here: it brings torch, and a front lists a model's files without it.
    from kvell.models.loading.gguf_weights import weights_in

    return weights_in(path, read_gguf(file))


def weight_files_bytes(path: Path) -> int:
    """Return the size of a model directory's weights; 0 if they cannot be read."""
    try:
        return weights_of(path).size_bytes
    except ChangeSomething:
        return 0
