"""Types of parameters as the sources write them: ``Tokens``, and not what that stands for.

Python evaluates an annotation before Sphinx sees it, so an alias would be shown as its whole
union.  Here the source is read again, and each name in it becomes the name to link to.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from textwrap import dedent
from typing import Any

from msgspec import Struct
from numpy.typing import NDArray

from scripts.reference.python.aliases import alias_names
from scripts.reference.python.docstrings import assigned_value

Known = Mapping[str, Any]


def written_annotations(value: Any) -> dict[str, str]:
    """Return the types of an object's parameters by name, and of what it returns as ``return``."""
    value = inspect.unwrap(value)
    if isinstance(value, property):
        value = value.fget
    try:
        return dict(_annotations(value))
    except (OSError, TypeError):  # no source: a class that was made by calling something
        return {}


def _annotations(value: Any) -> Iterator[tuple[str, str]]:
    if inspect.isfunction(value) or inspect.ismethod(value):
        yield from _of_function(value)
    elif inspect.isclass(value) and (is_dataclass(value) or issubclass(value, Struct)):
        for one in reversed(value.__mro__):
            if one.__module__.startswith("kvell"):
                yield from _of_fields(one)
    elif inspect.isclass(value) and inspect.isfunction(value.__init__):
        yield from _of_function(value.__init__)


def _of_function(function: Any) -> Iterator[tuple[str, str]]:
    [node] = ast.parse(dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    known = sys.modules[function.__module__].__dict__
    given = node.args
    for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if one is not None and one.annotation is not None:
            yield one.arg, linked(one.annotation, known)
    if node.returns is not None and node.name != "__init__":
        yield "return", linked(node.returns, known)


def _of_fields(value: type) -> Iterator[tuple[str, str]]:
    [node] = ast.parse(dedent(inspect.getsource(value))).body
    assert isinstance(node, ast.ClassDef)
    known = sys.modules[value.__module__].__dict__
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, linked(one.annotation, known)


def assigned_type(name: str) -> str:
    """Return what an alias stands for, as it is written where it is assigned."""
    module, value = assigned_value(name)
    return linked(value, sys.modules[module].__dict__)


def linked(annotation: ast.expr, known: Known) -> str:
    """Return an annotation with the full name of everything that it names.

    :param known: what names mean where the annotation stands.
    """
    return ast.unparse(_FullNames(known).visit(annotation))


class _FullNames(ast.NodeTransformer):
    """Replaces names by full ones, and text in quotation marks by what it says."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a plain name."""
        return ast.Name(full_name(node.id, self._known.get(node.id)))

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace ``module.name`` by the last name's full one."""
        owner = self._known.get(ast.unparse(node.value))
        return ast.Name(full_name(ast.unparse(node), getattr(owner, node.attr, None)))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Read a forward reference; leave None and the values of a Literal alone."""
        if not isinstance(node.value, str):
            return node
        read: ast.expr = self.visit(ast.parse(node.value, mode="eval").body)
        return read

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Leave the values of ``Literal[…]`` as they are."""
        value = self.visit(node.value)
        is_literal = ast.unparse(node.value).endswith("Literal")
        return ast.Subscript(value, node.slice if is_literal else self.visit(node.slice))


def full_name(name: str, value: Any) -> str:
    """Return the name under which the reference describes an object; the given one if unknown."""
    short = name.rpartition(".")[2]
    if value is NDArray:  # a generic alias, which claims to be what it stands for
        return "~numpy.typing.NDArray"
    alias = alias_names().get((short, id(value)))
    if alias is not None:
        return alias
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "builtins") or not isinstance(own, str):
        return short
    return f"{module}.{own}" if module.startswith("kvell.") else f"~{module}.{own}"
