"""Sizes of folders, files and functions, and forms of code that are limited."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from scripts.house.source import SOURCE, Module

HOST_READS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "as_tensor", "tensor"})
RECORDED = (
    "kvell.models.captured.device_step",
    "kvell.models.forward.hook",
    "kvell.models.forward.latents",
    "kvell.models.forward.module_pass",
    "kvell.models.forward.true_positions",
    "kvell.models.states.delta_scans",
    "kvell.models.states.mixers",
    "kvell.models.states.scans",
    "kvell.models.states.state_pages",
    "kvell.attention.triton.backend",
    "kvell.attention.triton.launch",
)
"""Modules whose operations a GPU records: nothing of theirs may wait for it."""
LONG_FILE_LINES, LONG_FUNCTION_LINES, FULL_FOLDER_FILES = 600, 60, 20
"""A file has at most this many lines of code: without docstrings, imports, comments and blanks."""
KERNELS = "kvell.attention.triton"
"""Functions there are compiled as one, and may be long."""


def full_folders(source: Path = SOURCE) -> dict[str, int]:
    """Python files of each folder that has too many."""
    counts: dict[str, int] = defaultdict(int)
    for path in source.rglob("*.py"):
        if path.name != "__init__.py":
            counts[str(path.parent.relative_to(source))] += 1
    return {name: count for name, count in sorted(counts.items()) if count > FULL_FOLDER_FILES}


def long_files(known: Mapping[str, Module]) -> dict[str, int]:
    """Lines of code of each file that has too many."""
    lines = {name: module.num_lines["code"] for name, module in known.items()}
    return {name: count for name, count in lines.items() if count > LONG_FILE_LINES}


def long_functions(known: Mapping[str, Module]) -> dict[str, int]:
    """Lines of each function that has too many, outside GPU kernels."""
    return {
        f"{name}.{function.name}": lines
        for name, module in known.items()
        if not name.startswith(KERNELS)
        for function in module.functions()
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > LONG_FUNCTION_LINES
    }


def host_reads(known: Mapping[str, Module]) -> list[str]:
    """Places in recorded steps that wait for the device, or copy Python's numbers to it."""
    return [
        f"{name}:{node.lineno}"
        for name in RECORDED
        for node in known[name].nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).rpartition(".")[2] in HOST_READS
    ]


def _overriding(kind: ast.ClassDef) -> set[str]:
    """Return the names of a class's methods that have ``@override``."""
    return {
        node.name
        for node in kind.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and "override" in map(ast.unparse, node.decorator_list)
    }


def count_any(known: Mapping[str, Module]) -> int:
    """How often ``Any`` stands in the source, imports aside."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for module in known.values()
        for node in module.nodes
    )


def shared_classes(known: Mapping[str, Module]) -> dict[str, list[str]]:
    """Public class names that several modules define, with these."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, module in known.items():
        for one in module.classes():
            if not one.name.startswith("_"):
                places[one.name].append(name)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def shared_methods(known: Mapping[str, Module], most: int = 3) -> dict[str, int]:
    """Public method names of more than ``most`` classes, unless a protocol has them.

    A class that overrides a method does not count.
    """
    counts: dict[str, int] = defaultdict(int)
    of_protocols: set[str] = set()
    for module in known.values():
        for one in module.classes():
            names = {node.name for node in one.body if isinstance(node, ast.FunctionDef)}
            names |= {node.name for node in one.body if isinstance(node, ast.AsyncFunctionDef)}
            is_protocol = any("Protocol" in ast.unparse(base) for base in one.bases)
            of_protocols |= names if is_protocol else set()
            for name in names - _overriding(one):
                counts[name] += not name.startswith("_")
    return {
        name: count
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
        if count > most and name not in of_protocols
    }
