"""What packages say of themselves is what pyproject.toml says, and valid."""

import tomllib
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.metadata import Metadata

from kvell.cli.main import root
from scripts.packages.building import (
    check_metadata,
    check_sdist,
    metadata_problems,
    parsed,
    wheel_metadata,
    wheel_tag,
)
from scripts.packages.checks import CheckError
from scripts.packages.installed import command_names
from tests.packaging.conftest import Built
from tests.packaging.written import ROOT

pytestmark = pytest.mark.xdist_group("built")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def metadata(built: Built) -> Metadata:
    return parsed(wheel_metadata(built.place))


def test_both_packages_say_what_the_project_says(built: Built) -> None:
    told = check_metadata(built.place)
    assert told.startswith(f"{PROJECT['name']} {PROJECT['version']}, ")


def test_the_sdist_is_complete_and_small(built: Built) -> None:
    assert check_sdist(built.place).startswith(f"{len(built.sources)} files, ")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("version", "9.9", "version is '0"),
        ("dependencies", [*PROJECT["dependencies"], "another"], "dependencies is"),
        ("requires-python", ">=3.99", "requires-python is"),
        ("license", "MIT", "license is 'Apache-2.0', not 'MIT'"),
    ],
)
def test_what_differs_is_named(metadata: Metadata, field: str, value: Any, named: str) -> None:
    [problem] = metadata_problems(metadata, {**PROJECT, field: value})
    assert problem.startswith(named)


def test_a_description_that_is_missing_is_named() -> None:
    bare = parsed(b"Metadata-Version: 2.4\nName: kvell\nVersion: 1\n")
    assert metadata_problems(bare, PROJECT)[-1] == "no description"


def test_a_description_of_the_right_metadata_is_no_problem(metadata: Metadata) -> None:
    assert metadata_problems(metadata, PROJECT) == []


@pytest.mark.parametrize("version", ["", "not a version"])
def test_metadata_that_is_not_valid_is_refused(version: str) -> None:
    with pytest.raises(CheckError, match=r"metadata is not valid: .*version"):
        parsed(f"Metadata-Version: 2.4\nName: kvell\nVersion: {version}\n".encode())


def test_tags_are_read_from_the_name() -> None:
    assert wheel_tag("kvell-1-cp311-cp311-linux_x86_64.whl") == "cp311-cp311-linux_x86_64"


def test_commands_are_read_from_a_help() -> None:
    text = CliRunner().invoke(root, ["--help"], prog_name="kvell").output
    hidden = {name for name, one in root.commands.items() if one.hidden}
    assert command_names(text) == sorted(set(root.commands) - hidden)


def test_a_help_without_commands_has_none() -> None:
    assert command_names("Usage: kvell\n") == []
