"""Environments of load tools that others wrote, each apart from Kvell's."""

import subprocess
import sys
from pathlib import Path

from bench.load.commands import OtherName
from bench.side_by_side.vllm_environment import vllm_python
from kvell.errors import ChangeSomething

GUIDELLM = ["torch==2.13.0", "guidellm==0.8.1"]
AIPERF = ["aiperf==0.13.0"]


def guidellm_python(directory: Path) -> Path:
    """The interpreter of an environment that has GuideLLM; made if there is none (1.5 GB).

    :raises ChangeSomething: if it cannot be installed.
    """
    remedy = "leave guidellm out of --tools"
    return _made(directory, "guidellm", GUIDELLM, "--guidellm-env", remedy)


def tool_python(name: OtherName, directory: Path) -> Path:
    """The interpreter of an environment that has a tool; made if there is none.

    :raises ChangeSomething: if it cannot be installed.
    """
    if name == "vllm":
        return vllm_python(directory)
    packages = GUIDELLM if name == "guidellm" else AIPERF
    return _made(directory, name, packages, "--tool-env", "choose another --tool")


def _made(directory: Path, program: str, packages: list[str], flag: str, remedy: str) -> Path:
    python = directory / "bin" / "python"
    if python.with_name(program).exists():
        return python
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "-q", *packages],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ChangeSomething(flag, str(directory), f"no tool: {last}", remedy)
    return python
