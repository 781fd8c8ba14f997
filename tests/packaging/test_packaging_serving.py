"""The check of a server accepts one that does all it should, and says what another does not."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.packages import serving
from scripts.packages.checks import CheckError
from scripts.packages.serving import check_server
from tests.packaging.written import ROOT, parameters_of

SERVER = Path(__file__).with_name("stand_in_server.py")
ANSWERS = {
    "/health": '{"status": "serving"}',
    "/": "<html><style>p {}</style><script>1</script></html>",
    "/v1/completions": json.dumps({"choices": [{"text": " Paris."}]}),
}


def check(folder: Path, answers: dict[str, str] | None = None, **more: Any) -> str:
    asked = json.dumps({"answers": {**ANSWERS, **(answers or {})}, "code": 0, **more})
    return check_server([sys.executable, str(SERVER), asked], folder, dict(os.environ))


def test_a_server_that_does_all_passes(tmp_path: Path) -> None:
    assert check(tmp_path) == "/health; / (0 KiB); /v1/completions; SIGTERM ends it with 0"


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", '{"status": "failed"}', "/health says"),
        ("/", "not found", "/ is no page"),
        ("/", "<html><style>/*STYLE*/</style></html>", "lacks what belongs in"),
        ("/v1/completions", '{"choices": [{"text": " London."}]}', "the completion is ' London.'"),
    ],
)
def test_a_wrong_answer_is_named_with_the_log(
    tmp_path: Path, path: str, answer: str, problem: str
) -> None:
    with pytest.raises(CheckError) as told:
        check(tmp_path, {path: answer})
    assert problem in str(told.value)
    assert "told on stderr" in str(told.value)


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    asked = json.dumps({"answers": {}, "code": 0})
    with pytest.raises(CheckError, match="/health: HTTP Error 404"):
        check_server([sys.executable, str(SERVER), asked], tmp_path, dict(os.environ))


def test_another_exit_code_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="ended with 3 at SIGTERM"):
        check(tmp_path, code=3)


@pytest.mark.parametrize("says", ["", "no JSON", '{"port": 1}', "[]"])
def test_a_first_line_without_a_url_is_named(tmp_path: Path, says: str) -> None:
    with pytest.raises(CheckError, match="said no URL"):
        check(tmp_path, says=says)


def test_a_server_that_ends_at_once_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with pytest.raises(CheckError, match=r"(?s)said no URL.*no model"):
        check_server(command, tmp_path, dict(os.environ))


def test_a_server_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "START_SECONDS", 0.2)
    with pytest.raises(CheckError, match="said no URL"):
        check_server(
            [sys.executable, "-c", "import signal; signal.pause()"], tmp_path, dict(os.environ)
        )


def test_a_server_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "END_SECONDS", 0.2)
    code = SERVER.read_text().replace("signal.sigwait({signal.SIGTERM})", "signal.pause()")
    deaf = tmp_path / "deaf.py"
    deaf.write_text(code)
    asked = json.dumps({"answers": ANSWERS, "code": 0})
    with pytest.raises(CheckError, match="did not end within"):
        check_server([sys.executable, str(deaf), asked], tmp_path, dict(os.environ))


def test_the_flags_are_those_of_kvell() -> None:
    taken = parameters_of(["serve", *serving.FLAGS])
    assert (taken["port"], taken["as_json"]) == (0, True)


def test_the_memory_map_has_the_places_that_are_looked_for() -> None:
    page = (ROOT / "src" / "kvell" / "server" / "map" / "static" / "map.html").read_text()
    assert all(place in page for place in serving.PLACES)
