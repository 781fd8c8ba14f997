"""Checks and errors of files that commands write."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvell.equivalents.entry import nearest
from kvell.errors import ChangeSomething

CONFIGS = Path("bench", "configs")
SHORTEST_PART = 3
"""The shortest beginning of a name, in characters, that is taken for the name."""
NEAR_NAME = 0.6
"""The least similarity of a name that is offered: names of sizes and versions differ in more."""
REPOSITORY = Path(__file__).resolve().parents[4]
"""The directory that contains ``CONFIGS`` when Kvell runs from its repository."""
FOLDERS = (CONFIGS, REPOSITORY / CONFIGS, Path(__file__).resolve().parents[2] / "configs")
"""The folders with configs: here, in the repository, and in a wheel."""


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
    """Return the path of the config called ``model`` in one of ``FOLDERS``; else ``model``."""
    for folder in FOLDERS:
        path = folder / f"{model}.json"
        if path.is_file() and not Path(model).exists():
            return str(path)
    return model


def config_names() -> list[str]:
    return sorted(
        {
            str(path.relative_to(folder).with_suffix(""))
            for folder in FOLDERS
            for path in folder.rglob("*.json")
        }
    )


def near_config(model: str) -> str:
    """Return the name of a config that a user may have meant; "" if none is near.

    Ids of hub models have an owner, and are not compared.
    """
    names = config_names()
    owner, _, own = model.rpartition("/")
    if not any(name.startswith(f"{owner}/") for name in names) and owner:
        return ""
    by_end = {name.rpartition("/")[2]: name for name in reversed(names)}
    word = own.lower()
    begun = [end for end in by_end if len(word) >= SHORTEST_PART and end.startswith(word)]
    near = begun[:1] or nearest(word, by_end, NEAR_NAME)
    return by_end[near[0]] if near else ""
