"""What tests read of the product that is private."""

import ast
import re
from collections.abc import Iterator, Mapping

from scripts.house.source import Module

PRIVATE = re.compile(r"(?<!self\.)(?<!cls\.)\b_[A-Za-z]")
"""Only modules with such a name need be parsed."""


def private_reads(tests: Mapping[str, Module], known: Mapping[str, Module]) -> list[str]:
    """Places where tests use private names of the product.

    An attribute ``x._name`` counts if ``x`` is neither ``self`` nor ``cls`` and the source defines
    ``_name``, and so does each private name that is imported from Kvell.
    """
    defined = {name for module in known.values() for name in _defined(module) if _is_private(name)}
    return [
        f"{name}:{node.lineno}: {used}"
        for name, module in tests.items()
        if PRIVATE.search(module.text)
        for node in module.nodes
        if isinstance(node, ast.Attribute | ast.ImportFrom)
        for used in _used(node)
        if _is_private(used) and (used in defined or isinstance(node, ast.ImportFrom))
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _used(node: ast.Attribute | ast.ImportFrom) -> list[str]:
    """Return the names that an attribute or an import takes from elsewhere."""
    if isinstance(node, ast.ImportFrom):
        is_kvell = (node.module or "").partition(".")[0] == "kvell"
        return [alias.name for alias in node.names] if is_kvell else []
    is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return [] if is_own else [node.attr]


def _defined(module: Module) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes that a module defines."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
