"""Checks and errors of files that commands write."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvell.errors import ChangeSomething

CONFIGS = Path("bench", "configs")
REPOSITORY = Path(__file__).resolve().parents[4]
"""The directory that contains ``CONFIGS`` when Kvell runs from its repository."""


def require_directory(flag: str, path: Path | None) -> None:
    """Check a file's directory early, so that a typing error does not cost a long run.

    :raises ChangeSomething: if the file's directory does not exist.
    """
    if path is not None and not path.parent.is_dir():
        raise ChangeSomething(flag, path, "is in no directory that exists", "give another path")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Report errors of writing a file with the flag that named it.

    :raises ChangeSomething: instead of an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise ChangeSomething(flag, path, problem, "give another path") from error


def named_config(model: str) -> str:
    """Return a config's path in ``bench/configs``, here or in the repository; else ``model``."""
    for place in (Path(), REPOSITORY):
        path = place / CONFIGS / f"{model}.json"
        if path.is_file() and not Path(model).exists():
            return str(path)
    return model
