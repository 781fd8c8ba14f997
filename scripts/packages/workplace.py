"""The temporary folder in which packages are built and tried."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.packages.checks import CheckError

LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "KVELL_CACHE_DIR", "XDG_CACHE_HOME")
"""Variables through which an environment could find what is not in it."""
SHOWN_LINES = 25


@dataclass(frozen=True)
class Workplace:
    """Where things lie.

    :param repository: whose packages are built; it is only read.
    :param folder: everything is written below it.
    """

    repository: Path
    folder: Path

    @property
    def constraints(self) -> Path:
        """The file of all versions."""
        return self.repository / "constraints.txt"

    @property
    def built(self) -> Path:
        """The folder of the finished packages."""
        return self.folder / "dist"

    @property
    def sdist(self) -> Path:
        """The archive of sources.

        :raises CheckError: if there is not exactly one.
        """
        return self._only("*.tar.gz")

    @property
    def wheel(self) -> Path:
        """The installable package.

        :raises CheckError: if there is not exactly one.
        """
        return self._only("*.whl")

    @property
    def programs(self) -> Path:
        """The folder of the fresh environment's commands."""
        return self.folder / "venv" / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of all commands: nothing leads out of the folder, nor to a hub."""
        kept = {name: value for name, value in os.environ.items() if name not in LEAKS}
        cache = self.folder / "cache"
        return {**kept, "KVELL_CACHE_DIR": str(cache), "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}

    def run(self, command: Sequence[str | Path], timeout_seconds: float, **variables: str) -> str:
        """Run a command in the folder and return what it wrote to stdout.

        :raises CheckError: if it fails or takes too long, with the end of what it wrote.
        """
        return run(command, self.folder, {**self.environment, **variables}, timeout_seconds)

    def _only(self, pattern: str) -> Path:
        found = sorted(self.built.glob(pattern))
        if len(found) != 1:
            raise CheckError(f"{len(found)} files {pattern} in {self.built}")
        return found[0]


def run(
    command: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> str:
    """Run a command and return what it wrote to stdout.

    :raises CheckError: if it fails or takes too long, with the end of what it wrote.
    """
    words = [str(word) for word in command]
    said = " ".join([Path(words[0]).name, *words[1:3]])
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise CheckError(f"{said} did not end within {timeout_seconds:g} s") from late
    except OSError as error:
        raise CheckError(f"{said} cannot be started ({error})") from error
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-SHOWN_LINES:])
        raise CheckError(f"{said} ended with {done.returncode}:\n{end}")
    return done.stdout
