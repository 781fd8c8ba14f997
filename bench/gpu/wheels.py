"""Fetch wheels of what Kvell needs beyond the packages that a machine with a GPU has.

Such a machine may reach no registry.  The wheels are of CPython 3.12 for Linux on x86-64, in the
versions of ``constraints.txt``, with all their dependencies; with them goes a wheel of Kvell
itself, so that its compiled parts are there too.  ``scripts/gpu_check --wheels`` installs them.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

REPOSITORY = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("expected_packages.txt")
CONSTRAINTS = REPOSITORY / "constraints.txt"
PROJECT = REPOSITORY / "pyproject.toml"
FOLDER = REPOSITORY / "build" / "device_wheels"
PYTHON = "3.12"
GLIBC = (2, 39)
"""The oldest C library of a machine with that Python: Ubuntu 24.04."""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34, 35, 39)),
    *(f"manylinux{year}_x86_64" for year in ("1", "2010", "2014")),
    "linux_x86_64",
)
MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "implementation_name": "cpython",
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "sys_platform": "linux",
}
STAMP = "kvell.sha256"
"""File beside the wheels: the hash of what Kvell's was compiled from."""
MOST_BYTES = 48 << 20
"""Bound on the working tree with the wheels: what is sent to a machine should stay small."""


def expected_packages() -> set[str]:
    """Return the names of the packages that a machine with a GPU is expected to have."""
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line) for line in lines if line and not line.startswith("#")}


def base_requirements() -> list[str]:
    """Return what Kvell needs in every installation."""
    requirements: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return requirements


def missing_packages(
    requirements: Iterable[str], expected: set[str], requirements_of: Callable[[str], Iterable[str]]
) -> list[str]:
    """Return the names of all packages that the requirements need and ``expected`` lacks.

    :param requirements_of: the requirements of a package that is missing.
    """
    missing: list[str] = []
    names = [name for text in requirements for name in _applicable(text)]
    while names:
        name = names.pop(0)
        if name not in expected and name not in missing:
            missing.append(name)
            names += [need for text in requirements_of(name) for need in _applicable(text)]
    return sorted(missing)


def _applicable(text: str) -> Iterator[str]:
    """Yield the package's name if the requirement holds for these wheels and no extra."""
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({**MARKERS, "extra": ""}):
        return
    if requirement.extras:
        raise ValueError(f"extras are not followed: {text}; name their packages")
    yield canonicalize_name(requirement.name)


def pinned_versions() -> dict[str, str]:
    """Return the versions of ``constraints.txt`` by package."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def fetch_wheel(name: str, folder: Path) -> Path:
    """Download one wheel without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command += ["--dest", str(folder), f"{name}=={pinned_versions()[name]}"]
    _run(command)
    [wheel] = [path for path in wheels_in(folder) if package_of(path) == name]
    return wheel


def wheels_in(folder: Path) -> list[Path]:
    """Return the wheels of a folder in order."""
    return sorted(folder.glob("*.whl"))


def package_of(wheel: Path) -> str:
    """Return the name of a wheel's package."""
    return str(parse_wheel_filename(wheel.name)[0])


def wheel_requirements(wheel: Path) -> list[str]:
    """Return the requirements that a wheel states."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/METADATA", name)]
        return BytesHeaderParser().parsebytes(archive.read(name)).get_all("Requires-Dist", [])


def find_python(named: Path | None = None) -> Path | None:
    """Return a Python of the wheels' version that can build extensions, or None."""
    on_path = shutil.which(f"python{PYTHON}")
    installed = sorted(Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python{PYTHON}"))
    candidates = [named] if named else [*([Path(on_path)] if on_path else []), *installed]
    return next((path for path in candidates if can_build(path)), None)


def can_build(python: Path) -> bool:
    """Return whether this is a Python of the wheels' version with headers and pip."""
    script = (
        "import os, pip, sys, sysconfig\n"
        "header = os.path.join(sysconfig.get_path('include'), 'Python.h')\n"
        "print(*sys.version_info[:2], sep='.', end=' ')\n"
        "print(os.path.exists(header))"
    )
    try:
        done = subprocess.run([python, "-c", script], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return done.stdout.split() == [PYTHON, "True"]


def native_hash(repository: Path = REPOSITORY) -> str:
    """Return a hash of everything that the compiled parts are built from."""
    names = ["CMakeLists.txt", "constraints.txt", "pyproject.toml"]
    files = [*(repository / name for name in names), *sorted((repository / "csrc").rglob("*"))]
    digest = hashlib.sha256()
    for path in (path for path in files if path.is_file()):
        digest.update(f"{path.relative_to(repository)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def has_kvell(folder: Path) -> bool:
    """Return whether the folder has a wheel of Kvell with the compiled parts of this tree.

    Its Python may be older: ``scripts/gpu_check`` takes that from the tree.
    """
    stamp = folder / STAMP
    is_there = any(package_of(path) == "kvell" for path in wheels_in(folder))
    return is_there and stamp.exists() and stamp.read_text() == native_hash()


def build_kvell(python: Path, folder: Path) -> Path:
    """Build Kvell's own wheel, which takes minutes."""
    (folder / STAMP).unlink(missing_ok=True)
    command = [str(python), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    _run([*command, str(folder), str(REPOSITORY)], PIP_CONSTRAINT=str(CONSTRAINTS))
    (folder / STAMP).write_text(native_hash())
    [wheel] = [path for path in wheels_in(folder) if package_of(path) == "kvell"]
    return wheel


def _run(command: list[str], **variables: str) -> None:
    """Run a command; if it fails, print the end of its output and exit."""
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-25:]))
        sys.exit(f"{' '.join(command[1:4])} failed with {done.returncode}: {command[-1]}")


def needed_glibc(wheel: Path) -> tuple[int, int]:
    """Return the newest C library that the compiled parts ask for."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    versions = [found for part in parts for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", part)]
    return max(((int(major), int(minor)) for major, minor in versions))


def compiled_line(wheel: Path) -> str:
    """Say what is compiled in Kvell's wheel and where it runs."""
    glibc = needed_glibc(wheel)
    fit = "" if glibc <= GLIBC else f": too new for {GLIBC[0]}.{GLIBC[1]}, build on an older system"
    return f"its compiled parts need glibc {glibc[0]}.{glibc[1]}{fit}"


def tree_bytes() -> int:
    """Return the size of the files that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    paths = {REPOSITORY / os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    return sum(path.stat().st_size for path in paths if path.is_file())


def mib(size_bytes: int) -> str:
    """Format a size."""
    return f"{size_bytes / 2**20:.1f} MiB"


def size_problem(tree: int, wheels: int, most: int = MOST_BYTES) -> str | None:
    """Say that tree and wheels together are too large, or return None."""
    if tree + wheels < most:
        return None
    return f"tree {mib(tree)} and wheels {mib(wheels)} are too large; keep them below {mib(most)}"


def main() -> int:
    """Fetch, build, and print the sizes; return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/device_wheels", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="where wheels go")
    parser.add_argument("--python", type=Path, help=f"a Python {PYTHON} with headers")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    is_built = has_kvell(folder)
    for old in wheels_in(folder):
        if not (is_built and package_of(old) == "kvell"):
            old.unlink()

    def fetched(name: str) -> list[str]:
        return wheel_requirements(fetch_wheel(name, folder))

    missing_packages(base_requirements(), expected_packages(), fetched)
    python = None if is_built else find_python(options.python)
    if is_built:
        print("Kvell's wheel is kept: nothing that is compiled has changed.")
    elif python is None:
        print(f"no Python {PYTHON} with headers and pip here: no wheel of Kvell itself was built.")
        print("scripts/gpu_check cannot run without it: the memory core is compiled.")
    else:
        print(f"Kvell is built with {python}", flush=True)
        print(compiled_line(build_kvell(python, folder)))
    sizes = {path.name: path.stat().st_size for path in wheels_in(folder)}
    for name, size_bytes in sizes.items():
        print(f"{mib(size_bytes):>9}  {name}")
    tree, wheels = tree_bytes(), sum(sizes.values())
    print(f"{mib(wheels):>9}  {len(sizes)} wheels in {folder}\n{mib(tree):>9}  working tree")
    problem = size_problem(tree, wheels)
    if problem:
        print(problem)
    return 1 if problem or not has_kvell(folder) else 0


if __name__ == "__main__":
    sys.exit(main())
