"""Wheels for one run: installed into a folder of its own, which goes with the run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).resolve().parents[2] / "src" / "kvell"


@contextmanager
def installed(wheels: Path | None) -> Iterator[None]:
    """Let processes that start meanwhile find the wheels of a folder before all other packages.

    Of Kvell's own wheel only the compiled parts count: Python comes from this tree, so that an
    older wheel never hides a change.

    :raises SystemExit: if there are no wheels, or pip cannot install them.
    """
    if wheels is None:
        yield
        return
    files = sorted(str(path) for path in wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"no wheels in {wheels}: run scripts/device_wheels")
    with TemporaryDirectory(prefix="kvell-wheels-") as folder:
        install(files, Path(folder))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *([before] if before else [])])
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def install(files: list[str], folder: Path) -> None:
    """Install wheels into a folder, without a network and without dependencies.

    :raises SystemExit: with the end of what pip wrote.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--target", str(folder), *files], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the wheels cannot be installed:\n{(done.stdout + done.stderr)[-1500:]}")
    if (folder / "kvell").is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(SOURCE, folder / "kvell", dirs_exist_ok=True, ignore=ignored)
