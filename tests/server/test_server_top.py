"""``kvell top`` against a live server."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.xdist_group("fake_server")

PATIENCE_SECONDS = 60.0


def top(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvell.cli.main", "top", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_one_look_as_a_table_and_as_json(server_url: str) -> None:
    table = top("--once", "--url", server_url)
    assert table.returncode == 0 and "mixed-0" in table.stdout and "serving" in table.stdout
    told = json.loads(top("--once", "--json", "--url", server_url).stdout)
    [instance] = told["instances"]
    assert instance["stats"]["output_tokens"] >= 0 and told["requests"]["waiting"] == 0
