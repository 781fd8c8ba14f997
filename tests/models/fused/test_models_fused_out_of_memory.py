"""A thread of a step that finds no memory fails the step, not the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.cases import some_fast

pytest.importorskip("kvell.models.fused._forward", reason="these tests are of compiled code")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")

PROGRAM = """
import resource, torch
from tests.models.fused.by_hand import OneLayer

values = torch.arange(32.0)
layer = OneLayer("portable", torch.bfloat16, torch.float32, values, hidden=1 << 16)
layer.run(1, {threads})
layer.pages.zero_()
pages = int(open("/proc/self/statm").read().split()[0])
limits = resource.getrlimit(resource.RLIMIT_AS)
room = 16 << 20
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, limits[1]))
full = False
taken = []

def take_all():
    try:
        while True:
            taken.append(bytearray(1 << 20))
    except MemoryError:
        pass

try:
    layer.run(6, {threads}, take_all)
except MemoryError:
    full = True
taken.clear()
resource.setrlimit(resource.RLIMIT_AS, limits)
assert full, "there was memory"
assert torch.equal(layer.run(6, {threads}), values.expand(6, -1))
print("went on")
"""


@pytest.mark.parametrize("threads", some_fast([1, 2], [2]))
def test_a_step_without_memory_raises_and_the_next_one_works(threads: int) -> None:
    """Rows of bfloat16 are widened in memory of each thread, which the first step makes larger."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{threads}", str(threads))],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
