"""The modules of a tree: their syntax, their lines by kind, and what they import."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TESTS = ROOT / "src", ROOT / "tests"
TOP = "(top)"
"""The room of files that are in no folder."""


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

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All parts of its syntax."""
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The top-level folder of the package that has the file, or ``(top)``."""
        folders = self.name.split(".")[: None if self.path.name == "__init__.py" else -1]
        return folders[1] if len(folders) > 1 else TOP

    @cached_property
    def num_lines(self) -> Counter[str]:
        """The number of lines by kind: ``docstring``, ``import``, ``comment``, ``blank``, ``code``.

        A docstring also documents an attribute or a constant.  It and an import have the blank
        lines and comments in them.
        """
        kinds = dict.fromkeys(map(id, _docstrings(self.nodes)), "docstring")
        by_line = {
            line: kinds.get(id(node), "import")
            for node in self.nodes
            if id(node) in kinds or isinstance(node, ast.Import | ast.ImportFrom)
            for line in _lines(node)
        }
        lines = enumerate(map(str.strip, self.text.splitlines()), start=1)
        return Counter(by_line.get(at) or _kind_of(line) for at, line in lines)

    def classes(self) -> Iterator[ast.ClassDef]:
        """All its classes."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All its functions and methods."""
        kinds = ast.FunctionDef, ast.AsyncFunctionDef
        return (node for node in self.nodes if isinstance(node, kinds))

    def imports(self) -> Iterator[tuple[str, ...]]:
        """What it imports anywhere, also in functions: candidates, the best first."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name,) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((f"{node.module}.{name.name}", node.module) for name in node.names)


def _docstrings(nodes: list[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the docstrings of a module's parts, and those that follow an assignment."""
    for owner in nodes:
        if not isinstance(
            owner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module | ast.ClassDef
        ):
            continue
        yield from filter(_is_text, owner.body[:1])
        if isinstance(owner, ast.Module | ast.ClassDef):
            for assignment, text in pairwise(owner.body):
                if isinstance(assignment, ast.Assign | ast.AnnAssign) and _is_text(text):
                    yield text


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is a string."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return False
    return isinstance(node.value.value, str)


def _kind_of(line: str) -> str:
    """Return the kind of a stripped line outside docstrings and imports."""
    if not line:
        return "blank"
    return "comment" if line.startswith("#") else "code"


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
