"""Circles between modules that import each other."""

from collections.abc import Mapping

from scripts.house.source import Module


def circles(known: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not.

    Imports under ``TYPE_CHECKING`` and in functions count.
    """
    below: dict[str, set[str]] = {name: set() for name in known}
    for name, module in known.items():
        for candidates in module.imports():
            below[name] |= {one for one in candidates if one in known and one != name}
            if candidates[0].rpartition(".")[2].startswith("_"):  # a compiled module of the package
                below[name].discard(candidates[-1])
    return [sorted(one) for one in _components(below) if len(one) > 1]


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
