"""Kernels compiled for a GPU, which needs none: that the compiler takes them, and what it makes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.models.cases import long_unless

pytest.importorskip("triton", reason="Triton is not made for this system")

SHARED_BYTES = 227 << 10
"""Shared memory of a program on sm_90."""


@dataclass(frozen=True)
class Limits:
    """The most registers and bytes of stack (spills) of a thread, and the fewest 16-byte loads.

    ``today`` has the figures of Triton 3.9.0.
    """

    registers: int
    stack_bytes: int
    wide_loads: int
    today: tuple[int, int, int]


# 168 registers let three programs of 4 warps share a multiprocessor, 128 four.
LIMITS = {
    "8B decode": Limits(168, 0, 64, today=(168, 0, 98)),
    "8B prefill": Limits(255, 0, 32, today=(254, 0, 40)),
    "8B write": Limits(32, 0, 1, today=(18, 0, 1)),
    "1B decode": Limits(128, 0, 32, today=(128, 0, 49)),
    "1B prefill": Limits(192, 0, 16, today=(182, 0, 20)),
    "1B write": Limits(32, 0, 0, today=(16, 0, 0)),
}
KINDS = ("decode", "prefill", "write")
OTHERS = (*(f"int8 {kind}" for kind in KINDS), *(f"fp8 latents {kind}" for kind in KINDS), "copy")


def run(names: Sequence[str], cache: Path) -> Any:
    """Figures of kernels that a program compiles, in a process that does not interpret them."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.machine_code", *names],
        env=without | {"TRITON_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=long_unless(name == "8B decode")) for name in LIMITS]
)
def test_machine_code_is_within_its_limits(name: str, tmp_path: Path) -> None:
    figures, limits = run([name], tmp_path)[name], LIMITS[name]
    assert figures["registers"] <= limits.registers
    assert figures["stack_bytes"] <= limits.stack_bytes
    assert figures["shared_bytes"] <= SHARED_BYTES
    assert figures["wide_loads"] >= limits.wide_loads


@pytest.mark.long
def test_every_other_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter runs much that the compiler refuses."""
    others = run(OTHERS, tmp_path)
    assert set(others) == set(OTHERS)
    assert all(figures["registers"] > 0 for figures in others.values())
