"""The guide to installing names what is there: flags, files, make's targets, times, versions."""

import re
import subprocess

import pytest

from tests.docs.fences import blocks_in
from tests.packaging.written import ROOT, instructions_of, parameters_of, settings_of

GUIDE = (ROOT / "docs" / "install.md").read_text()
BLOCKS = [one for one in blocks_in("install.md") if one.language == "console"]
COMMANDS = [
    line[2:]
    for block in BLOCKS
    for line in block.text.replace("\\\n", " ").splitlines()
    if line[:2] in ("$ ", "# ")
]
UNIT = settings_of((ROOT / "packaging" / "kvell.service").read_text())
DOCKERFILE = (ROOT / "packaging" / "Dockerfile").read_text()


def constraints() -> list[str]:
    return (ROOT / "constraints.txt").read_text().splitlines()


def test_commands_were_found() -> None:
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("options", re.findall(r"KVELL_OPTIONS=([^`]+)`", GUIDE))
def test_options_of_the_service_are_flags_of_serve(options: str) -> None:
    assert parameters_of(["serve", *options.split()]) != parameters_of(["serve"])


def test_containers_are_started_with_flags_of_serve() -> None:
    served = [line.partition(" kvell serve ")[2] for line in COMMANDS if " kvell serve " in line]
    assert served
    for flags in served:
        assert parameters_of(["serve", *flags.split()])["host"] == "0.0.0.0"


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_knows_its_targets(line: str) -> None:
    target = line.split()[1]
    told = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    assert f"make {target} " in told.stdout


def test_files_of_the_repository_are_there() -> None:
    named = {word for line in COMMANDS for word in line.split() if word.startswith("packaging/")}
    assert named == {"packaging/Dockerfile", "packaging/kvell.service"}
    assert all((ROOT / path).is_file() for path in named)


def test_docker_waits_as_long_as_systemd() -> None:
    times = re.findall(r"--stop-timeout (\d+)", GUIDE)
    assert times
    assert set(times) == set(UNIT["TimeoutStopSec"])


def test_containers_keep_what_the_image_declares() -> None:
    instructions = instructions_of(DOCKERFILE)
    [volume] = [one.text for one in instructions if one.word == "VOLUME"]
    runs = [line for line in COMMANDS if line.startswith("docker run")]
    assert runs
    assert all(f":{volume} " in line for line in runs)


def test_users_get_the_versions_that_are_tested() -> None:
    pinned = re.findall(r"\b([\w-]+==[\w.]+)", " ".join(COMMANDS))
    assert pinned
    assert set(pinned) <= set(constraints())
    wheels = [line for line in COMMANDS if "pip install" in line and ".whl" in line]
    assert all("--constraint constraints.txt" in line for line in wheels)


def test_torch_comes_from_the_same_index_as_in_the_image() -> None:
    [index] = re.findall(r"TORCH_INDEX_URL=(\S+)", DOCKERFILE)
    assert any(f"--index-url {index} " in line for line in COMMANDS)


def test_programs_lie_where_the_unit_looks_for_them() -> None:
    folder = UNIT["ExecStart"][0].partition("/bin/")[0]
    assert f"python3.11 -m venv {folder}" in COMMANDS
    assert any(line.startswith(f"{folder}/bin/pip install") for line in COMMANDS)
