"""The weights of a model, by the kind of its files."""

from pathlib import Path

from kvell.errors import ChangeSomething
from kvell.models.families.quantised_schemes import scheme_of
from kvell.models.gguf.gguf_file import read_gguf
from kvell.models.loading.quantised_weights import quantised_weights
from kvell.models.loading.weight_files import WeightMap, read_weight_map
from kvell.models.sources.gguf_directory import gguf_source


def weights_of(path: Path, config: object = None) -> WeightMap:
    """Read the headers of a model's weight files.

    :param config: its ``quantization_config`` says what tensors mean; None: files as they are.
    :raises ChangeSomething: if files are missing, damaged, or of a type that is not read.
    """
    file = gguf_source(path)
    if file is not None:
        # Imported here: it brings torch, and a front lists a model's files without it.
        from kvell.models.loading.gguf_weights import weights_in

        return weights_in(path, read_gguf(file))
    weights = read_weight_map(path)
    scheme = scheme_of(config, path)
    return weights if scheme is None else quantised_weights(weights, scheme)


def weight_files_bytes(path: Path) -> int:
    """Return the size of a model's weights in their files; 0 if they cannot be read."""
    try:
        return weights_of(path).size_bytes
    except ChangeSomething:
        return 0
