"""Units compiled for one instruction set keep their code to themselves.

The linker may keep any of several equal weak symbols.  If a unit compiled for AVX-512 emitted one,
units for every processor could end up calling it.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OBJECTS = sorted(
    path
    for path in (ROOT / "build").glob("cp3*/csrc/*/CMakeFiles/*/backend_*.o")
    if path.name != "backend_portable.cpp.o"
)
WEAK = frozenset("WwVvu")
"""What nm calls weak symbols, weak objects and unique ones."""

pytestmark = [
    pytest.mark.skipif(not OBJECTS, reason="nothing was compiled for one instruction set"),
    pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm"),
]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parents[2].name}/{path.stem}")
def test_a_unit_for_one_instruction_set_emits_no_weak_symbol(path: Path) -> None:
    command = ["nm", "--defined-only", "--demangle", "--format=posix", str(path)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = [line.rsplit(maxsplit=3) for line in lines]
    shared = [symbol[0] for symbol in symbols if symbol[1] in WEAK]
    assert symbols
    assert not shared
