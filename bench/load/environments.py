"""The environment of GuideLLM, apart from Kvell's."""

import subprocess
import sys
from pathlib import Path

from kvell.errors import ChangeSomething

GUIDELLM = ("torch==2.13.0", "guidellm==0.8.1")


def guidellm_python(directory: Path) -> Path:
    """Return the interpreter of an environment that has GuideLLM; make one if needed (1.5 GB).

    :raises ChangeSomething: if it cannot be installed.
    """
    python = directory / "bin" / "python"
    if python.with_name("guidellm").exists():
        return python
    for command in (
        [sys.executable, "-m", "venv", str(directory)],
        [str(python), "-m", "pip", "install", "-q", *GUIDELLM],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            remedy = "leave guidellm out of --tools"
            raise ChangeSomething("--guidellm-env", str(directory), f"no tool: {last}", remedy)
    return python
