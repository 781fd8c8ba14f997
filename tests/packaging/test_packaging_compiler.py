"""A build where nothing can be compiled: it ends with what to do."""

import os
import subprocess
import sys
from pathlib import Path

from tests.packaging.written import ROOT

CMAKE = Path(sys.prefix, "bin", "cmake")


def test_a_build_without_a_compiler_ends_with_one_clear_sentence(tmp_path: Path) -> None:
    command = [str(CMAKE), "-S", str(ROOT), "-B", str(tmp_path)]
    environ = {**os.environ, "CXX": "/nowhere/c++"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode
    assert (
        "Kvell cannot be built without a C++ compiler: install one (Debian: apt install g++), "
        "or install a wheel of Kvell." in " ".join(done.stderr.split())
    )
