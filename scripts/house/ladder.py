"""Code that passes on what other code does: counted, so that it becomes less."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from scripts.house.source import Module

MOST_COPIED = 2
"""A construction may take this many attributes of one object."""


def pass_on_functions(known: Mapping[str, Module]) -> list[str]:
    """Functions that only pass on a call.

    Without its docstring, the body is one statement: a call, returned, awaited or neither, whose
    arguments are all plain names (also with a star or as keywords), or that has no arguments.
    """
    return [
        f"{name}.{function.name}"
        for name, module in known.items()
        for function in module.functions()
        if _passes_on(function)
    ]


def _passes_on(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = function.body[ast.get_docstring(function) is not None :]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    if isinstance(call, ast.Await):
        call = call.value
    return isinstance(call, ast.Call) and all(isinstance(one, ast.Name) for one in _values(call))


def _values(call: ast.Call) -> Iterator[ast.expr]:
    """Yield the arguments of a call, without stars and keywords."""
    for argument in call.args:
        yield argument.value if isinstance(argument, ast.Starred) else argument
    for keyword in call.keywords:
        yield keyword.value


def copies(known: Mapping[str, Module]) -> list[str]:
    """Constructions that copy three or more fields of one object into another.

    Calls of a name that begins with a capital, at least three of whose arguments are attributes of
    the same expression: ``Ended(visit.a, visit.b, c=visit.c)``.
    """
    return [
        f"{name}:{node.lineno}"
        for name, module in known.items()
        for node in module.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2].lstrip("_")[:1].isupper()
        and max(_sources(node).values(), default=0) > MOST_COPIED
    ]


def _sources(call: ast.Call) -> Counter[str]:
    """Return the number of arguments that are attributes of each object."""
    return Counter(
        ast.unparse(value.value) for value in _values(call) if isinstance(value, ast.Attribute)
    )


def lone_protocols(known: Mapping[str, Module]) -> dict[str, str]:
    """Protocols with exactly one structural implementation, which has this name.

    An implementation is a class, not itself a protocol, that has all names of the protocol: its
    methods, attributes, what it assigns to ``self``, and those of its base classes in the source.
    """
    classes = [kind for module in known.values() for kind in module.classes()]
    by_name: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for kind in classes:
        by_name[kind.name].append(kind)
    protocols = [kind for kind in classes if "Protocol" in _bases(kind)]
    others = [(kind, _members(kind, by_name)) for kind in classes if kind not in protocols]
    lone = {}
    for protocol in protocols:
        needed = _members(protocol, by_name)
        implementations = [kind.name for kind, members in others if needed <= members]
        if len(implementations) == 1:
            lone[protocol.name] = implementations[0]
    return lone


def _bases(kind: ast.ClassDef) -> list[str]:
    """Return the names of the base classes, without modules and type arguments."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]


def _members(kind: ast.ClassDef, by_name: Mapping[str, list[ast.ClassDef]]) -> frozenset[str]:
    """Return the names that a class and its bases have, without ``__init__``."""
    names: set[str] = set()
    waiting, seen = [kind], set()
    while waiting:
        owner = waiting.pop()
        if id(owner) not in seen:
            seen.add(id(owner))
            names |= set(_own_members(owner))
            waiting += [base for name in _bases(owner) for base in by_name.get(name, ())]
    return frozenset(names - {"__init__"})


def _own_members(kind: ast.ClassDef) -> Iterator[str]:
    for node in kind.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    stores = (one for one in ast.walk(kind) if isinstance(getattr(one, "ctx", None), ast.Store))
    yield from (
        store.attr
        for store in stores
        if isinstance(store, ast.Attribute) and ast.unparse(store.value) == "self"
    )


def packed_statements(known: Mapping[str, Module]) -> list[str]:
    """Places that pack values to save lines.

    Statements that assign values of unlike form, like ``a, b = 0, run()``, and tuples or lists that
    are written out behind a star: ``*(a, b),``.
    """
    return [
        f"{name}:{node.lineno}"
        for name, module in known.items()
        for node in module.nodes
        if (isinstance(node, ast.Assign) and _is_unlike(node))
        or (isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List))
    ]


def _is_unlike(node: ast.Assign) -> bool:
    """Return whether a statement assigns values of unlike form; a swap does not."""
    targets, value = node.targets[0], node.value
    if not (isinstance(targets, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    is_swap = {*map(ast.unparse, targets.elts)} & {*map(ast.unparse, value.elts)}
    return not is_swap and len({_form(element) for element in value.elts}) > 1


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
