"""Violations of the rules of English in sources and documents: ``python -m scripts.prose``.

``tests/test_house`` holds each count, which may only fall.  ``--list KIND`` prints the places.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.house import Module, modules
from scripts.house.source import ROOT

DOCUMENTS = ("*.md", "docs/**/*.md", "bench/**/*.md", "src/**/*.md", "examples/**/*.md")
NOT_PROSE = ("CHANGELOG.md",)
"""Older entries of the changelog stay as they are."""
FIRST = re.compile(r"(Of|Who|Whom|Whose|Those|That|What|Where|See)\b")
NO_VERB = re.compile(r"(The|A|An|Whether|How|How many|All|Each|Every|Its|Their|If|No|Same)\b")
METAPHORS = re.compile(
    r"\b(told|tell|tells|heard|hear|hears|said|so many|so much|nobody|somebody|whoever)\b",
    re.IGNORECASE,
)
LOCALS = frozenset({"one", "found", "told", "asked", "known"})
IRREGULAR = r"told|heard|said|seen|lent|held|sent|drawn|given|kept|gone|come|found|made|shown|left"
PARTICIPLE = re.compile(rf"({IRREGULAR}|(?!(speed|need|feed|embed|seed)$)[a-z]+ed)", re.IGNORECASE)
ELLIPTIC = re.compile(
    r":(?:param|ivar) \w+:\s+(?:"
    "about|above|across|after|against|along|among|around|as|at|before|behind|below|beneath|beside|"
    "besides|between|beyond|by|despite|down|during|except|for|from|in|inside|into|like|near|of|off|"
    "on|onto|out|outside|over|past|per|since|than|that|those|through|to|toward|towards|under|until|"
    "up|upon|via|with|within|without"
    r")\b"
)
"""Prepositions, and pronouns: a parameter's text that begins with one lacks its noun."""
STRINGS = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
PYTHON_COMMENT = re.compile(rf"\"\"\".*?\"\"\"|'''.*?'''|{STRINGS}|(#[^\n]*)", re.DOTALL)
COMPILED_COMMENT = re.compile(rf"{STRINGS}|(//[^\n]*|/\*.*?\*/)", re.DOTALL)
COMPILED = ("*.h", "*.cpp", "*.cu", "*.cuh")
TOOLS = ("bench", "scripts")
"""Folders whose docstrings and comments are read as well."""
WORD_LIST = "kvell.load.prompts"
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|:\w+:`[^`]*`|\[[^\]]*\]\([^)]*\)", re.DOTALL)

Found = tuple[str, ast.expr | ast.arg | ast.stmt, str]
"""Kind, place and text."""


@dataclass(frozen=True)
class Violation:
    """One place that breaks a rule.

    :param kind: ``first sentence``, ``verb``, ``docstring``, ``parameter``, ``comment``,
        ``message``, ``document``, ``local``, ``name``, ``private name``.
    :param room: top-level folder of the package, ``documents``, ``docs/adr``, ``bench``,
        ``scripts``, or a folder in ``csrc``.
    """

    kind: str
    room: str
    place: str
    text: str


def violations(
    sources: Mapping[str, Module] | None = None, root: Path = ROOT, room: str | None = None
) -> list[Violation]:
    """Return all violations of sources and documents.

    :param room: return those of this room only.
    """
    source = (modules() if sources is None else sources).values()
    places = [
        *(place for module in source for place in of_module(module, room_of(module.name))),
        *(place for folder in TOOLS for place in of_tools(root / folder)),
        *of_compiled(root / "csrc"),
        *(Violation("document", *found) for found in documents(root)),
    ]
    return [place for place in places if room in (None, place.room)]


def of_module(module: Module, room: str) -> Iterator[Violation]:
    """Yield violations in a module of the product."""
    for kind, node, text in (
        *docstrings(module),
        *messages(module),
        *local_names(module),
        *participles(module),
    ):
        yield Violation(kind, room, f"{module.path}:{node.lineno}", text)
    yield from comments(module.path, module.text, PYTHON_COMMENT, room)


def of_tools(folder: Path) -> Iterator[Violation]:
    """Yield violations in docstrings and comments of benches or scripts."""
    for module in modules(folder).values():
        for kind, node, text in docstrings(module):
            yield Violation(kind, folder.name, f"{module.path}:{node.lineno}", text)
        yield from comments(module.path, module.text, PYTHON_COMMENT, folder.name)


def of_compiled(folder: Path) -> Iterator[Violation]:
    """Yield violations in comments of C++; a room is a folder."""
    for path in sorted(path for pattern in COMPILED for path in folder.rglob(pattern)):
        room = "/".join(path.relative_to(folder.parent).parts[:-1][:2])
        yield from comments(path, path.read_text(), COMPILED_COMMENT, room)


def comments(path: Path, text: str, pattern: re.Pattern[str], room: str) -> Iterator[Violation]:
    """Yield metaphors in comments.

    :param pattern: matches comments, with a group, and strings, without one.
    """
    for comment in pattern.finditer(text):
        for match in METAPHORS.finditer(CODE.sub("", comment[1] or "")):
            line = text.count("\n", 0, comment.start()) + 1
            yield Violation("comment", room, f"{path}:{line}", match.group())


def room_of(name: str) -> str:
    """Return the room of a module."""
    return name.split(".")[1] if "." in name else name


def counts(places: list[Violation]) -> dict[str, Counter[str]]:
    """Return the number of violations by kind and room."""
    table: dict[str, Counter[str]] = {}
    for place in places:
        table.setdefault(place.kind, Counter())[place.room] += 1
    return table


def docstrings(module: Module) -> Iterator[Found]:
    """Yield violations in docstrings, also of attributes and constants."""
    for owner in module.nodes:
        body = getattr(owner, "body", None)
        if not isinstance(body, list):
            continue
        for index, node in enumerate(body):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            text = node.value.value
            if not isinstance(text, str):
                continue
            first = text.strip().split("\n\n")[0]
            if FIRST.match(first):
                yield "first sentence", node.value, first
            elif index == 0 and is_function(owner) and NO_VERB.match(first):
                yield "verb", node.value, first
            for match in METAPHORS.finditer(CODE.sub("", text)):
                yield "docstring", node.value, match.group()
            for parameter in ELLIPTIC.finditer(text):
                yield "parameter", node.value, parameter.group()


def is_function(node: ast.AST) -> bool:
    """Return whether a node is a function that is not read as an attribute."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
    return not decorators & {"property", "cached_property", "setter", "fixture"}


def messages(module: Module) -> Iterator[Found]:
    """Yield metaphors in texts that users read: all strings but docstrings and names."""
    if module.name == WORD_LIST:
        return
    skipped = {
        id(node.value)
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in module.nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if id(node) in skipped or " " not in node.value.strip():
            continue
        for match in METAPHORS.finditer(CODE.sub("", node.value)):
            yield "message", node, f"{match.group()}: {node.value}"


def local_names(module: Module) -> Iterator[Found]:
    """Yield parameters and variables whose name carries no noun, once each in a function."""
    functions = list(module.functions())
    inner = {
        id(node)
        for function in functions
        for node in ast.walk(function)
        if node is not function and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for function in functions:
        if id(function) in inner:
            continue
        names: dict[str, ast.expr | ast.arg] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node)
            elif isinstance(node, ast.arg):
                names.setdefault(node.arg, node)
        yield from (("local", node, name) for name, node in names.items() if name in LOCALS)


def participles(module: Module) -> Iterator[Found]:
    """Yield classes and functions whose name is a bare participle; attributes may be."""
    for node in [*module.classes(), *filter(is_function, module.functions())]:
        if PARTICIPLE.fullmatch(node.name.lstrip("_")):
            yield "private name" if node.name.startswith("_") else "name", node, node.name


def documents(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield room, place and word of metaphors in documents."""
    paths = {path for pattern in DOCUMENTS for path in root.glob(pattern)}
    for path in sorted(paths):
        if path.name in NOT_PROSE or ".venv" in path.parts:
            continue
        room = "docs/adr" if path.parent.name == "adr" else "documents"
        text = CODE.sub(lambda match: "\n" * match.group().count("\n"), path.read_text())
        for number, line in enumerate(text.splitlines(), 1):
            for match in METAPHORS.finditer(line):
                yield room, f"{path}:{number}", match.group()


def main() -> None:
    """Print the counts by kind and room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", metavar="KIND", help="print the places of a kind")
    parser.add_argument("--room", help="of this room alone")
    options = parser.parse_args()
    places = violations(room=options.room)
    if options.list:
        for place in places:
            if place.kind == options.list:
                print(f"{place.place}: {place.text}")
        return
    for kind, rooms in sorted(counts(places).items()):
        print(f"{kind}: {rooms.total()}")
        for room, count in rooms.most_common():
            print(f"  {count:5} {room}")


if __name__ == "__main__":
    main()
