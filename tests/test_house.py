"""How the source is built: what stands here may get smaller, and never larger."""

from collections import Counter
from pathlib import Path

import pytest

from scripts.house import (
    Module,
    circles,
    count_any,
    full_folders,
    host_reads,
    long_files,
    long_functions,
    modules,
    packed_statements,
    shared_classes,
    shared_methods,
)
from scripts.prose import counts, violations

FULL_FOLDERS: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
PACKED: dict[str, int] = {}
MOST_ANY = 572
MOST_SHARED_CLASSES = 32
MOST_SHARED_METHODS = 43
"""Names of methods that more than three classes have, and no protocol."""
MOST_VIOLATIONS = {
    "name": {
        "cli": 3,
        "cluster": 1,
        "elastic": 3,
        "engine": 18,
        "errors": 2,
        "fleet": 3,
        "front": 3,
        "load": 3,
        "mempool": 26,
        "models": 2,
        "prefix": 1,
        "server": 5,
        "serving": 2,
        "simulator": 1,
        "wire": 1,
    },
}
"""Violations of the rules of English by kind and room; all others are 0."""


@pytest.fixture(scope="module")
def known() -> dict[str, Module]:
    return modules()


def beyond(found: dict[str, int], allowed: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in found.items() if size > allowed.get(name, 0)}


def test_modules_do_not_import_each_other_in_a_circle(known: dict[str, Module]) -> None:
    assert circles(known) == []


def test_folders_are_small_enough_to_be_read() -> None:
    assert beyond(full_folders(), FULL_FOLDERS) == {}


def test_files_are_small_enough_to_be_read(known: dict[str, Module]) -> None:
    assert beyond(long_files(known), LONG_FILES) == {}


def test_functions_are_small_enough_to_be_read(known: dict[str, Module]) -> None:
    assert beyond(long_functions(known), LONG_FUNCTIONS) == {}


def test_statements_are_not_packed(known: dict[str, Module]) -> None:
    rooms = Counter(place.split(".")[1] for place in packed_statements(known))
    assert beyond(rooms, PACKED) == {}


def test_types_are_said(known: dict[str, Module]) -> None:
    assert count_any(known) <= MOST_ANY


def test_a_name_is_of_one_thing(known: dict[str, Module]) -> None:
    assert len(shared_classes(known)) <= MOST_SHARED_CLASSES
    assert len(shared_methods(known)) <= MOST_SHARED_METHODS


def test_recorded_steps_wait_for_nothing(known: dict[str, Module]) -> None:
    assert host_reads(known) == []


def test_english_is_plain(known: dict[str, Module]) -> None:
    found = counts(violations(known))
    for kind, rooms in found.items():
        assert beyond(dict(rooms), MOST_VIOLATIONS.get(kind, {})) == {}, kind


def test_violations_of_the_rules_of_english_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        "package/room/a.py",
        '''"""Who waits."""
class Lent:
    """A loan that nobody returns."""
def heard(one: int) -> str:
    """The text.

    ``told`` is code.
    """
    found = f"so many: {one} "
    return found
''',
    )
    write(tmp_path, "README.md", "Whoever reads\n`said` is told\n")
    sources = modules(tmp_path)
    assert {
        kind: rooms.total() for kind, rooms in counts(violations(sources, tmp_path)).items()
    } == {
        "first sentence": 1,
        "verb": 1,
        "docstring": 1,
        "message": 1,
        "local": 2,
        "name": 2,
        "document": 2,
    }


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_figures_see_what_they_look_for(tmp_path: Path) -> None:
    """A made-up source that breaks every rule."""
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.a import A\n"
    write(tmp_path, "room/__init__.py", "")
    write(tmp_path, "room/a.py", "from room.b import B\nclass A:\n    def ended(self): ...\n")
    write(tmp_path, "room/b.py", guarded + "class A: ...\nclass B: ...\nx: Any = 1\n")
    write(tmp_path, "room/d.py", "a, b = 0, 1\na, b = b, f()\na, b = 0, f()\n")
    lines = "\n".join("    x = 1" for _ in range(70))
    rest = '"""Text.\n\n- and more\n"""\nimport os\n# why\n' * 90 + "y = 2\n" * 530
    write(tmp_path, "room/c.py", f"def long():\n{lines}\n{rest}")
    for index in range(20):
        write(tmp_path, f"full/m{index}.py", "class One:\n    def ended(self): ...\n")
    known = modules(tmp_path)
    assert circles(known) == [["room.a", "room.b"]]
    assert full_folders(tmp_path) == {"full": 20}
    assert long_files(known) == {"room.c": 601}
    assert long_functions(known) == {"room.c.long": 71}
    assert packed_statements(known) == ["room.d:3"]
    assert count_any(known) == 1
    assert list(shared_classes(known)) == ["A", "One"]
    assert shared_methods(known) == {"ended": 21}
