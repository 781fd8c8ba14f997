"""A model's embeddings by its files, in sentence-transformers' and vLLM's notation.

Any pooling of a model's output yields numbers, even a wrong one. So files that require an unserved
pooling cause a refusal. A model without such files gets the vector of the prompt's last token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvell.errors import ChangeSomething
from kvell.models.config.config_fields import optional_size, text_config
from kvell.models.config.json_files import (
    CONFIG_FILE,
    MALFORMED,
    REPAIR_CONFIG,
    json_value,
    read_by_library,
    read_optional_json,
)

MODULES_FILE = "modules.json"
LAST_TOKEN = "lasttoken"
_MODE = "pooling_mode"
_SERVED = frozenset({"Transformer", "Pooling", "Normalize"})
_SIZES = ("hidden_size", "d_model", "n_embd")


@dataclass(frozen=True)
class EmbeddingFacts:
    """The properties of a model's embeddings.

    :param size: numbers of a vector.
    :param problem: why they are not served; "" if they are.
    :param is_matryoshka: whether the model was trained for vectors that are cut.
    :param sizes: to which they may be cut; empty: to any.
    """

    size: int
    problem: str = ""
    is_matryoshka: bool = False
    sizes: tuple[int, ...] = ()

    def require_served(self, model: str) -> None:
        """Raise unless the model's embeddings are served.

        :raises ChangeSomething: naming the model, and why they are not.
        """
        if self.problem:
            remedy = "use a model whose embedding is that of its last token"
            raise ChangeSomething("model", model, self.problem, remedy)

    def checked_size(self, dimensions: int | None) -> int:
        """Return the requested size of a vector; None requests all numbers.

        :raises ChangeSomething: if the model was not trained for vectors of this size.
        """
        if dimensions is None or dimensions == self.size:
            return self.size
        if not self.is_matryoshka:
            problem = f"differs from the model's {self.size}, and it was not trained to be cut"
            remedy = 'leave it out; "is_matryoshka": true in config.json says that it was'
            raise ChangeSomething("dimensions", dimensions, problem, remedy)
        if not 1 <= dimensions <= self.size or (self.sizes and dimensions not in self.sizes):
            most = ", ".join(map(str, self.sizes)) or f"1 to {self.size}"
            problem = "is not a size that the model was trained for"
            raise ChangeSomething("dimensions", dimensions, problem, f"use {most}")
        return dimensions


def embedding_facts(path: Path, config: Any) -> EmbeddingFacts:
    with read_by_library(path, MALFORMED, REPAIR_CONFIG):
        sizes = tuple(int(size) for size in getattr(config, "matryoshka_dimensions", None) or ())
        return EmbeddingFacts(
            optional_size(text_config(config), _SIZES),
            _problem(path),
            bool(getattr(config, "is_matryoshka", False)) or bool(sizes),
            sizes,
        )


def _problem(path: Path) -> str:
    try:
        return _modules_problem(path)
    except ChangeSomething as damage:  # which must not keep the model from writing text
        return f"has no embeddings while {Path(str(damage.value)).name} {damage.problem}"


def _modules_problem(path: Path) -> str:
    """Return why the steps that sentence-transformers would take are not served; "" if they are.

    :raises ChangeSomething: if a file is no valid JSON.
    """
    for module in _modules(path / MODULES_FILE):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _SERVED:
            return f"puts a module {kind[:40]!r} on its embeddings ({MODULES_FILE})"
        if kind == "Pooling":
            folder = Path(str(module.get("path", ""))).name
            modes = _pooling_modes(read_optional_json(path / folder / CONFIG_FILE))
            if modes != {LAST_TOKEN}:
                names = ", ".join(sorted(modes)) or "nothing"
                return f"pools {names[:80]} ({folder}/{CONFIG_FILE}), and not its last token"
    return ""


def _modules(file: Path) -> list[Mapping[str, Any]]:
    if not file.is_file():
        return []
    modules = json_value(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ChangeSomething("model", file, "holds no list of modules", "fetch the file again")
    return modules


def _pooling_modes(fields: Mapping[str, Any]) -> set[str]:
    named = fields.get(_MODE)
    if named is not None:
        return {str(mode) for mode in (named if isinstance(named, list) else [named])}
    prefix = f"{_MODE}_"
    flags = (name for name, on in fields.items() if name.startswith(prefix) and on)
    return {name.removeprefix(prefix) for name in flags}
