"""Builds the packages, and reads what they say of themselves."""

import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from scripts.packages.checks import CheckError, demand, demand_none
from scripts.packages.contents import (
    GENERATED,
    sdist_files,
    sdist_problems,
    source_files,
    wheel_files,
    wheel_problems,
)
from scripts.packages.workplace import Workplace

BUILD_SECONDS = 3600.0
"""Compiling takes minutes, and longer where others compile too."""
MOST_SDIST_BYTES = 2 << 20
"""Sources are some 0.8 MiB; what is much more holds something else."""
MOST_WHEEL_BYTES = 12 << 20


def build_sdist(place: Workplace) -> str:
    """Build the sdist from the repository."""
    _build(place, "--sdist", place.repository)
    return place.sdist.name


def build_wheel(place: Workplace) -> str:
    """Build the wheel from what the sdist holds, and from nothing else."""
    with tarfile.open(place.sdist) as archive:
        archive.extractall(place.folder / "sources", filter="data")
    _build(place, "--wheel", place.folder / "sources" / sdist_name(place))
    return place.wheel.name


def sdist_name(place: Workplace) -> str:
    """Return the name of the folder in the sdist."""
    return place.sdist.name.removesuffix(".tar.gz")


def _build(place: Workplace, kind: str, sources: Path) -> None:
    """Build in an environment of its own, which has the pinned build tools."""
    command = [sys.executable, "-m", "build", kind, "--outdir", str(place.built), str(sources)]
    place.run(command, BUILD_SECONDS, PIP_CONSTRAINT=str(place.constraints))


def check_sdist(place: Workplace) -> str:
    """Find all sources and nothing else in the sdist."""
    held, size_bytes = sdist_files(place.sdist), place.sdist.stat().st_size
    demand_none(sdist_problems(held, source_files(place.repository)))
    demand(size_bytes <= MOST_SDIST_BYTES, f"{size_bytes:,} bytes, more than {MOST_SDIST_BYTES:,}")
    return f"{len(held)} files, {size_bytes / 2**20:.1f} MiB"


def check_wheel(place: Workplace) -> str:
    """Find the whole package, data and compiled parts too, and nothing else in the wheel."""
    held, size_bytes = wheel_files(place.wheel), place.wheel.stat().st_size
    ending = str(sysconfig.get_config_var("EXT_SUFFIX"))
    demand_none(wheel_problems(held, sdist_files(place.sdist), ending))
    demand(size_bytes <= MOST_WHEEL_BYTES, f"{size_bytes:,} bytes, more than {MOST_WHEEL_BYTES:,}")
    return f"{len(held)} files, {size_bytes / 2**20:.1f} MiB, tag {wheel_tag(place.wheel.name)}"


def wheel_tag(name: str) -> str:
    """Return where a wheel may be installed, as its file name says."""
    return " ".join(sorted(str(tag) for tag in parse_wheel_filename(name)[3]))


def check_metadata(place: Workplace) -> str:
    """Find in both packages valid metadata, the same in both, as pyproject.toml has it."""
    project = tomllib.loads((place.repository / "pyproject.toml").read_text())["project"]
    of_sdist, of_wheel = sdist_metadata(place), wheel_metadata(place)
    demand(of_sdist == of_wheel, "the wheel says other things than the sdist")
    metadata = parsed(of_wheel)
    demand_none(metadata_problems(metadata, project))
    return f"{metadata.name} {metadata.version}, {len(metadata.requires_dist or [])} requirements"


def sdist_metadata(place: Workplace) -> bytes:
    """Return the sdist's PKG-INFO."""
    with tarfile.open(place.sdist) as archive:
        file = archive.extractfile(f"{sdist_name(place)}/{GENERATED}")
        if file is None:
            raise CheckError(f"{GENERATED} is no file")
        return file.read()


def wheel_metadata(place: Workplace) -> bytes:
    """Return the wheel's METADATA."""
    folder = "-".join(place.wheel.name.split("-")[:2])
    with zipfile.ZipFile(place.wheel) as archive:
        return archive.read(f"{folder}.dist-info/METADATA")


def parsed(content: bytes) -> Metadata:
    """Parse metadata and hold it against the specification.

    :raises CheckError: naming the fields that are wrong.
    """
    try:
        return Metadata.from_email(content)
    except ExceptionGroup as group:
        problems = "; ".join(str(one) for one in group.exceptions)
        raise CheckError(f"metadata is not valid: {problems}") from group


def metadata_problems(metadata: Metadata, project: dict[str, Any]) -> list[str]:
    """Return in what metadata differs from the table ``project``."""
    extras = project["optional-dependencies"]
    wanted = {Requirement(text) for text in project["dependencies"]}
    told = {one for one in metadata.requires_dist or [] if "extra" not in str(one.marker)}
    said = {
        "name": (metadata.name, project["name"]),
        "version": (str(metadata.version), project["version"]),
        "summary": (metadata.summary, project["description"]),
        "license": (metadata.license_expression, project["license"]),
        "requires-python": (str(metadata.requires_python), project["requires-python"]),
        "dependencies": (told, wanted),
        "extras": (set(metadata.provides_extra or []), set(extras)),
        "form of the description": (metadata.description_content_type, "text/markdown"),
        "license files": (metadata.license_files, project["license-files"]),
    }
    problems = [f"{name} is {is_!r}, not {be!r}" for name, (is_, be) in said.items() if is_ != be]
    return problems if (metadata.description or "").strip() else [*problems, "no description"]
