"""A model as its directory has it: sizes and an identity, for lists of models."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import KV_HEADS, optional_size, text_config
from kvell.models.config.json_files import CONFIG_FILE
from kvell.models.loading.model_weights import weights_of
from kvell.models.sources.gguf_directory import gguf_source

PACKED = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
"""Dtypes of which an element may hold several numbers of the model."""
_SIZES = (
    ("block_count", ("num_hidden_layers", "n_layer", "num_layers")),
    ("embedding_length", ("hidden_size", "d_model", "n_embd")),
    ("feed_forward_length", ("intermediate_size", "ffn_dim", "n_inner")),
    ("attention.head_count", ("num_attention_heads", "n_head")),
    ("attention.head_count_kv", KV_HEADS),
    ("vocab_size", ("vocab_size",)),
)
"""GGUF's names of sizes, and the fields of configs that have them."""


@dataclass(frozen=True)
class StoredModel:
    """A model as its directory has it.

    :param size_bytes: bytes of its weight files; 0 without any.
    :param parameters: numbers in its weights; 0 if the files do not say.
    :param digest: SHA-256, in hex, of its config, and of its weight files' names, sizes and tensors
        (without the data); "" without any.
    :param modified_unix_seconds: time of the last change of these files; None without any.
    :param sizes: sizes of its config by GGUF's names, without the model's kind.
    :param is_gguf: whether its weights are a GGUF file.
    """

    size_bytes: int = 0
    parameters: int = 0
    digest: str = ""
    modified_unix_seconds: float | None = None
    sizes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    is_gguf: bool = False


def stored_model(path: Path, config: object) -> StoredModel:
    """Return the facts of a model's directory.

    Weight files that are missing or damaged have no facts: where they are loaded, that is an error.
    """
    text = text_config(config)
    sizes = {name: optional_size(text, fields) for name, fields in _SIZES}
    by_name = MappingProxyType({name: size for name, size in sizes.items() if size})
    digest = hashlib.sha256()
    size_bytes, parameters = 0, 0
    modified_unix_seconds = 0.0
    is_counted = True
    try:
        digest.update((path / CONFIG_FILE).read_bytes())
        weights = weights_of(path, config)
        for file in weights.files:
            status = file.stat()
            digest.update(f"{file.name} {status.st_size}\n".encode())
            size_bytes += status.st_size
            modified_unix_seconds = max(modified_unix_seconds, status.st_mtime)
        for _, tensor in sorted(weights.stored.items()):
            digest.update(f"{tensor}\n".encode())
            is_counted = is_counted and tensor.dtype not in PACKED
            parameters += math.prod(tensor.shape)
    except (ChangeSomething, OSError):
        return StoredModel(sizes=by_name)
    counted = parameters if is_counted else 0
    is_gguf = gguf_source(path) is not None
    facts = (size_bytes, counted, digest.hexdigest(), modified_unix_seconds, by_name, is_gguf)
    return StoredModel(*facts)
