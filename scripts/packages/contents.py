"""What the sdist and the wheel must hold, and that nothing lies beside it."""

import tarfile
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

CONFIGS = "bench/configs/"
"""The folder of configs in the sources; CMake puts them into ``kvell/configs/`` of a wheel."""
FOLDERS = ("bench/configs", "csrc", "src/kvell")
"""All files in them belong to the sdist."""
FILES = (
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
)
"""What else does."""
GENERATED = "PKG-INFO"
SUFFIXES = {
    "cmake",
    "cpp",
    "css",
    "h",
    "html",
    "inl",
    "js",
    "json",
    "md",
    "py",
    "pyi",
    "toml",
    "txt",
}
"""Of files in these folders; what has another is junk, but for the marks of typed packages."""
TYPED = "py.typed"
ADDED_TO_WHEELS = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
"""In a wheel's .dist-info folder."""


def source_files(repository: Path) -> set[str]:
    """Return the paths of everything that belongs to the sdist."""
    below = (path for folder in FOLDERS for path in (repository / folder).rglob("*"))
    paths = (path.relative_to(repository).as_posix() for path in below if path.is_file())
    return {*FILES, *(path for path in paths if not _is_left_out(path))}


def sdist_files(sdist: Path) -> set[str]:
    """Return the paths of an sdist's files, below its one folder."""
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    return {name.partition("/")[2] for name in names}


def wheel_files(wheel: Path) -> set[str]:
    """Return the paths of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_problems(held: Collection[str], sources: Collection[str]) -> list[str]:
    """Return what an sdist lacks of the sources, and what it has beside them."""
    return [
        *_differences(held, {*sources, GENERATED}),
        *(f"of no known kind: {path}" for path in sorted(sources) if not _is_known(path)),
    ]


def wheel_problems(held: Collection[str], sources: Collection[str], ending: str) -> list[str]:
    """Return what a wheel lacks of the sources' package and compiled parts, and what is too much.

    :param ending: of compiled parts, such as ``.cpython-311-x86_64-linux-gnu.so``; empty for a
        wheel that was built without a compiler.
    """
    package = {path.removeprefix("src/") for path in sources if path.startswith("src/")}
    built = {f"{part}{ending}" for part in compiled_parts(sources)} | installed_configs(sources)
    compiled = built if ending else set()
    about = {path.split("/")[0] for path in held if ".dist-info/" in path}
    added = {f"{folder}/{name}" for folder in about for name in ADDED_TO_WHEELS}
    return [
        *([] if len(about) == 1 else [f"{len(about)} folders .dist-info"]),
        *_differences(held, package | compiled | added),
    ]


def installed_configs(sources: Iterable[str]) -> set[str]:
    """Return the paths of configs in a wheel, by whose names ``kvell plan`` knows them."""
    named = (path for path in sources if path.startswith(CONFIGS) and path.endswith(".json"))
    return {path.replace(CONFIGS, "kvell/configs/") for path in named}


def compiled_parts(sources: Iterable[str]) -> list[str]:
    """Return the paths of compiled parts without their ending: each has a stub beside it."""
    stubs = (PurePosixPath(path) for path in sources if path.endswith(".pyi"))
    parts = (str(path.with_suffix("")) for path in stubs if path.name.startswith("_"))
    return sorted(part.removeprefix("src/") for part in parts if not part.endswith("__init__"))


def _differences(held: Collection[str], wanted: Collection[str]) -> list[str]:
    return [
        *(f"missing: {path}" for path in sorted(set(wanted) - set(held))),
        *(f"does not belong there: {path}" for path in sorted(set(held) - set(wanted))),
    ]


def _is_left_out(path: str) -> bool:
    return "__pycache__" in PurePosixPath(path).parts or path.endswith(".so")


def _is_known(path: str) -> bool:
    name = PurePosixPath(path)
    return path in FILES or name.name == TYPED or name.suffix[1:] in SUFFIXES
