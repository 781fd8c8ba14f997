"""The systemd unit starts a guarded server, and gives it the time and the rights that it needs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvell.cli.terminal.faults import CHANGE
from kvell.fleet.started.front_limits import FrontLimits
from tests.packaging.written import ROOT, parameters_of, settings_of

UNIT = ROOT / "packaging" / "kvell.service"
SETTINGS = settings_of(UNIT.read_text())
PROGRAM = "/opt/kvell/bin/kvell"


def setting(name: str) -> str:
    [value] = SETTINGS[name]
    return value


def variables() -> dict[str, str]:
    """What ``Environment=`` sets; one that holds spaces stands in quotes."""
    words = re.findall(r'"([^"]+)"|(\S+)', " ".join(SETTINGS["Environment"]))
    return dict((quoted or plain).split("=", 1) for quoted, plain in words)


def command() -> list[str]:
    options = variables()["KVELL_OPTIONS"].split()
    words = setting("ExecStart").split()
    return [*words[: words.index("$KVELL_OPTIONS")], *options]


def test_the_command_is_a_server_for_this_machine_with_keys() -> None:
    program, *words = command()
    assert program == PROGRAM
    taken = parameters_of(words)
    assert taken["host"] == "127.0.0.1"
    assert str(taken["api_key_file"]).startswith("${CREDENTIALS_DIRECTORY}/")


def test_the_file_of_keys_is_the_credential() -> None:
    name, _, source = setting("LoadCredential").partition(":")
    assert command()[command().index("--api-key-file") + 1].endswith(f"/{name}")
    assert Path(source).parent == Path(setting("EnvironmentFile").lstrip("-")).parent


def test_more_flags_come_last_and_may_be_none() -> None:
    assert setting("ExecStart").endswith(" $KVELL_OPTIONS")
    parameters_of(setting("ExecStart").split()[1:-1])


def test_stopping_may_take_longer_than_the_front_and_its_instances_drain() -> None:
    assert float(setting("TimeoutStopSec")) > 2 * FrontLimits().drain_seconds
    assert (setting("KillMode"), setting("KillSignal")) == ("mixed", "SIGTERM")


def test_what_the_user_must_change_is_not_tried_again() -> None:
    assert setting("Restart") == "on-failure"
    assert setting("RestartPreventExitStatus") == str(CHANGE)


def test_an_instance_that_runs_out_of_memory_does_not_end_the_others() -> None:
    assert setting("OOMPolicy") == "continue"


def test_models_and_libraries_write_into_folders_of_the_service() -> None:
    folders = {"%S": SETTINGS["StateDirectory"], "%C": SETTINGS["CacheDirectory"]}
    written = {**variables(), "WorkingDirectory": setting("WorkingDirectory")}
    del written["KVELL_OPTIONS"]
    assert {"HOME", "KVELL_CACHE_DIR", "HF_HOME"} <= set(written)
    for place in written.values():
        kind, name = place.split("/")[:2]
        assert folders[kind] == [name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("CapabilityBoundingSet", ""),
        ("SystemCallFilter", "@system-service"),
    ],
)
def test_the_service_may_do_little(name: str, value: str) -> None:
    assert setting(name) == value


@pytest.mark.parametrize("name", ["MemoryDenyWriteExecute", "ProcSubset"])
def test_what_kvell_needs_is_not_taken_from_it(name: str) -> None:
    assert name not in SETTINGS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize(("mistake", "is_accepted"), [("", True), ("\nTimeoutStopsSec=75", False)])
def test_systemd_knows_every_setting(tmp_path: Path, mistake: str, is_accepted: bool) -> None:
    copy = tmp_path / "kvell.service"
    # It also looks for the program, which is not installed here.
    text = UNIT.read_text().replace(PROGRAM, sys.executable)
    copy.write_text(text.replace("\nRestart=", f"{mistake}\nRestart="))
    verify = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
    complaints = [line for line in done.stderr.splitlines() if "kvell.service" in line]
    assert (complaints == [] and done.returncode == 0) is is_accepted
