"""All figures that have a budget."""

from collections import Counter
from collections.abc import Mapping

from scripts.house.forms import count_any, shared_classes, shared_methods
from scripts.house.ladder import copies, lone_protocols, packed_statements, pass_on_functions
from scripts.house.reads import private_reads
from scripts.house.source import Module


def code_lines(known: Mapping[str, Module]) -> Counter[str]:
    """Return the lines of code of each room: without docstrings, imports, comments and blanks."""
    lines: Counter[str] = Counter()
    for module in known.values():
        lines[module.room] += module.num_lines["code"]
    return lines


def figures(known: Mapping[str, Module], tests: Mapping[str, Module]) -> dict[str, int]:
    """Return all other figures that may only fall, by name.

    :param tests: the modules of the tests.
    """
    return {
        "functions that pass on": len(pass_on_functions(known)),
        "protocols of one class": len(lone_protocols(known)),
        "copies of fields": len(copies(known)),
        "packed statements": len(packed_statements(known)),
        "private names in tests": len(private_reads(tests, known)),
        "docstring lines": sum(module.num_lines["docstring"] for module in known.values()),
        "uses of Any": count_any(known),
        "shared class names": len(shared_classes(known)),
        "shared method names": len(shared_methods(known)),
    }
