"""A processor as its system tells it."""

from pathlib import Path

from kvell.device.processor import Processor, processor

CPUINFO = """processor : 0
cpu family : 25
model      : 17
model name : AMD EPYC
stepping   : 1
flags      : fpu avx2 sse2 avx512_bf16

processor : 1
model name : another
"""


def told(tmp_path: Path, text: str) -> Processor:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    return processor(tmp_path)


def test_a_name_and_what_kernels_choose_by(tmp_path: Path) -> None:
    assert told(tmp_path, CPUINFO) == Processor("AMD EPYC (25.17.1)", ("avx2", "avx512_bf16"))


def test_arm(tmp_path: Path) -> None:
    found = told(tmp_path, "processor : 0\nFeatures : fp asimd sve\n")
    assert found.features == ("asimd", "sve")
    assert found.name


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert processor(tmp_path).features == ()
    assert processor(tmp_path).name
