"""Figures of how the source is built: ``python -m scripts.house``.

Folders and files that are too large, circles between modules (imports under ``TYPE_CHECKING``
count), long functions, uses of ``Any``, and names that stand in many places.  ``tests/test_house``
holds the source to them.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
HOST_READS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "as_tensor", "tensor"})
RECORDED = (
    "kvell.models.captured.device_step",
    "kvell.models.forward.hook",
    "kvell.models.forward.latents",
    "kvell.models.forward.module_pass",
    "kvell.models.forward.true_positions",
    "kvell.models.states.mixers",
    "kvell.models.states.delta_scans",
    "kvell.models.states.mixers",
    "kvell.models.states.scans",
    "kvell.models.states.state_pages",
    "kvell.attention.triton.backend",
    "kvell.attention.triton.launch",
)
"""Modules whose operations a GPU records: nothing of theirs may wait for it."""
LONG_FILE_LINES, LONG_FUNCTION_LINES, FULL_FOLDER_FILES = 600, 60, 14
"""A file has at most this many lines of code: without docstrings, imports, comments and blanks."""
KERNELS = "kvell.attention.triton"
"""Functions there are compiled as one, and may be long."""


@dataclass(frozen=True)
class Module:
    """One file.

    :ivar name: as it is imported.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """Its source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text)

    @property
    def num_lines(self) -> int:
        """Lines of the file."""
        return len(self.text.splitlines())

    @cached_property
    def num_code_lines(self) -> int:
        """Lines of the file without docstrings, imports, comments and blanks."""
        passed = {line for node in ast.walk(self.tree) if _is_prose(node) for line in _lines(node)}
        lines = enumerate(map(str.strip, self.text.splitlines()), start=1)
        return sum(1 for at, line in lines if line and line[0] != "#" and at not in passed)

    def classes(self) -> Iterator[ast.ClassDef]:
        """All its classes."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All its functions and methods."""
        kinds = ast.FunctionDef, ast.AsyncFunctionDef
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def imports(self) -> Iterator[tuple[str, ...]]:
        """What it imports at its top or under ``TYPE_CHECKING``: candidates, the best first."""
        for node in self.tree.body:
            inner = node.body if isinstance(node, ast.If) else [node]
            for one in inner:
                if isinstance(one, ast.Import):
                    yield from ((alias.name,) for alias in one.names)
                elif isinstance(one, ast.ImportFrom) and one.module:
                    yield from ((f"{one.module}.{name.name}", one.module) for name in one.names)


def _is_prose(node: ast.AST) -> bool:
    """Whether a node is an import, a docstring, or a text that documents a name."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _lines(node: ast.AST) -> range:
    assert isinstance(node, ast.stmt)
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def modules(source: Path = SOURCE) -> dict[str, Module]:
    """All modules below a folder, by name."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def circles(known: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""
    below: dict[str, set[str]] = {name: set() for name in known}
    for name, module in known.items():
        for candidates in module.imports():
            below[name] |= {one for one in candidates if one in known and one != name}
            if candidates[0].rpartition(".")[2].startswith("_"):  # a compiled module of the package
                below[name].discard(candidates[-1])
    return [sorted(one) for one in _components(below) if len(one) > 1]


def full_folders(source: Path = SOURCE) -> dict[str, int]:
    """Python files of each folder that has too many."""
    counts: dict[str, int] = defaultdict(int)
    for path in source.rglob("*.py"):
        if path.name != "__init__.py":
            counts[str(path.parent.relative_to(source))] += 1
    return {name: count for name, count in sorted(counts.items()) if count > FULL_FOLDER_FILES}


def long_files(known: Mapping[str, Module]) -> dict[str, int]:
    """Lines of code of each file that has too many."""
    lines = {name: module.num_code_lines for name, module in known.items()}
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
        for node in ast.walk(known[name].tree)
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


def packed_statements(known: Mapping[str, Module]) -> list[str]:
    """Places that assign values of unlike form in one statement, like ``a, b = 0, run()``."""
    return [
        f"{name}:{node.lineno}"
        for name, module in known.items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign)
        and isinstance(targets := node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and not {*map(ast.unparse, targets.elts)} & {*map(ast.unparse, node.value.elts)}
        and len({_form(value) for value in node.value.elts}) > 1
    ]


def _form(value: ast.expr) -> str:
    """Return the form of a value: a name, a constant, the call of a function, …"""
    if isinstance(value, ast.UnaryOp):
        value = value.operand
    if isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Subscript)  # list[int]()
    ):
        return "constant"
    if isinstance(value, ast.List | ast.Tuple | ast.Dict):
        return "constant" if not list(ast.iter_child_nodes(value))[:-1] else "collection"
    if isinstance(value, ast.Name | ast.Attribute):
        return "name"
    if isinstance(value, ast.Call):
        return f"call of {ast.unparse(value.func).rpartition('.')[2]}"
    return type(value).__name__


def count_any(known: Mapping[str, Module]) -> int:
    """How often ``Any`` stands in the source, imports aside."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for module in known.values()
        for node in ast.walk(module.tree)
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


def _components(below: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan), without recursion."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in below:
        if root in index:
            continue
        work = [(root, iter(below[root]))]
        index[root] = lowest[root] = len(index)
        stack.append(root)
        while work:
            name, rest = work[-1]
            child = next(rest, None)
            if child is None:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[name])
                if lowest[name] == index[name]:
                    at = stack.index(name)
                    found.append(stack[at:])
                    del stack[at:]
            elif child not in index:
                index[child] = lowest[child] = len(index)
                stack.append(child)
                work.append((child, iter(below[child])))
            elif child in stack:
                lowest[name] = min(lowest[name], index[child])
    return found


def main() -> None:
    """Print all figures."""
    known = modules()
    lines = sum(module.num_lines for module in known.values())
    print(f"lines of src/: {lines:,} in {len(known)} files")
    print(f"circles: {circles(known)}")
    print(f"folders of more than {FULL_FOLDER_FILES} files: {full_folders()}")
    print(f"files of more than {LONG_FILE_LINES} lines of code: {long_files(known)}")
    print(f"functions of more than {LONG_FUNCTION_LINES} lines: {long_functions(known)}")
    print(f"statements that assign unlike values: {len(packed_statements(known))}")
    print(f"Any: {count_any(known)}")
    print(f"class names that several modules define: {len(shared_classes(known))}")
    print(f"method names of many classes: {shared_methods(known)}")


if __name__ == "__main__":
    main()
