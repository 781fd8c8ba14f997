"""What the sources say of an object: its docstring, its parameters, and texts below assignments."""

import ast
import inspect
import re
from dataclasses import is_dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct
from sphinx.pycode import ModuleAnalyzer

FIELD = re.compile(r"^:(?:param|ivar) (\w+):", re.MULTILINE)
OWN = "kvell."


def found(name: str) -> Any:
    """Return the object with a dotted name: one that a module has."""
    module, _, attribute = name.rpartition(".")
    return resolve_name(f"{module}:{attribute}")


def docstring(name: str) -> str:
    """Return the docstring of a class or function, or the text below an assignment; "" if none."""
    value = found(name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.cleandoc(value.__doc__ or "")
    module, _, attribute = name.rpartition(".")
    return below_assignment(module, attribute)


def below_assignment(module: str, name: str, owner: str = "") -> str:
    """Return the text below an assignment of a module or of its class ``owner``; "" if none."""
    home = module if owner else assigned_in(module, name)
    texts = ModuleAnalyzer.for_module(home).find_attr_docs()
    return inspect.cleandoc("\n".join(texts.get((owner, name), [])))


def assigned_in(module: str, name: str) -> str:
    """Return the module that assigns a name, which others import from it."""
    for node in _statements(module):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(OWN):
            continue
        if any(name == (one.asname or one.name) for one in node.names):
            return assigned_in(str(node.module), name)
    return module


def assigned_value(name: str) -> tuple[str, ast.expr]:
    """Return the module that assigns a dotted name, and the expression there."""
    module, _, attribute = name.rpartition(".")
    home = assigned_in(module, attribute)
    for node in _statements(home):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute:
            return home, node.value
    raise LookupError(f"{home} assigns no {attribute}")


def _statements(module: str) -> list[ast.stmt]:
    return ast.parse(ModuleAnalyzer.for_module(module).code).body


def parameter_texts(text: str) -> dict[str, str]:
    """Return what a docstring says of each parameter, on one line each."""
    texts = {}
    text = inspect.cleandoc(text)
    for match in FIELD.finditer(text):
        lines = text[match.end() :].split("\n")
        more = []
        for line in lines[1:]:
            if not line.startswith("  "):
                break
            more.append(line.strip())
        texts[match[1]] = " ".join([lines[0].strip(), *more])
    return texts


def field_texts(value: Any) -> dict[str, str]:
    """Return the texts below the fields of a class and of Kvell's classes that it extends."""
    texts: dict[str, str] = {}
    for owner in reversed(value.__mro__ if inspect.isclass(value) else ()):
        if owner.__module__.startswith(OWN):
            for name in vars(owner).get("__annotations__", {}):
                text = below_assignment(owner.__module__, name, owner.__name__)
                texts |= {name: " ".join(text.split())} if text else {}
    return texts


def parameters(value: Any) -> list[str]:
    """Return the names of the parameters that somebody can give; none of what has none."""
    if inspect.isclass(value) and not _is_made_by_users(value):
        return []
    signature = inspect.signature(value)
    variable = (inspect.Parameter.VAR_POSITIONAL,)
    return [p.name for p in signature.parameters.values() if p.kind not in variable]


def _is_made_by_users(value: type) -> bool:
    """Whether a class has parameters of its own: no enum, no protocol, no plain error."""
    if getattr(value, "_is_protocol", False):
        return False
    has_fields = is_dataclass(value) or issubclass(value, Struct)
    return has_fields or inspect.isfunction(vars(value).get("__init__"))


def public_members(value: type) -> dict[str, Any]:
    """Return the functions and properties of a class itself that are public, by name."""
    members = {name: one for name, one in vars(value).items() if not name.startswith("_")}
    return {name: one for name, one in members.items() if _is_described(one)}


def _is_described(member: Any) -> bool:
    plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return inspect.isfunction(plain) or isinstance(plain, property | cached_property)
