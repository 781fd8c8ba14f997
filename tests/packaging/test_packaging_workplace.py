"""Commands run in the temporary folder, and see nothing of what is outside."""

import json
import os
import sys
from pathlib import Path

import pytest

from scripts.packages.checks import CheckError
from scripts.packages.workplace import LEAKS, Workplace
from tests.packaging.written import ROOT

PATIENCE_SECONDS = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return Workplace(ROOT, tmp_path)


def python(place: Workplace, code: str, seconds: float = PATIENCE_SECONDS, **more: str) -> str:
    return place.run([sys.executable, "-c", code], seconds, **more)


def test_commands_run_in_the_folder(place: Workplace) -> None:
    assert python(place, "import os; print(os.getcwd())").strip() == str(place.folder)


def test_no_variable_leads_out_of_the_folder(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LEAKS:
        monkeypatch.setenv(name, str(ROOT))
    told = json.loads(python(place, "import json, os; print(json.dumps(dict(os.environ)))"))
    assert [name for name in LEAKS if told.get(name) == str(ROOT)] == []
    assert told["KVELL_CACHE_DIR"].startswith(str(place.folder))
    assert told["HF_HUB_OFFLINE"] == "1"
    assert told["PATH"] == os.environ["PATH"]


def test_variables_can_be_added(place: Workplace) -> None:
    assert python(place, "import os; print(os.environ['MORE'])", MORE="much") == "much\n"


def test_a_failure_tells_the_end_of_what_was_written(place: Workplace) -> None:
    code = "import sys\nfor n in range(99): print('line', n)\nsys.exit('what went wrong')"
    with pytest.raises(CheckError) as told:
        python(place, code)
    text = str(told.value)
    assert "ended with 1" in text
    assert "line 98" in text
    assert "what went wrong" in text
    assert "line 50\n" not in text


def test_a_command_that_does_not_end_fails(place: Workplace) -> None:
    with pytest.raises(CheckError, match="did not end within"):
        python(place, "import signal; signal.pause()", 0.2)


def test_a_command_that_is_not_there_fails(place: Workplace) -> None:
    with pytest.raises(CheckError, match="cannot be started"):
        place.run([place.programs / "kvell"], PATIENCE_SECONDS)


def test_a_package_is_found_where_there_is_one(place: Workplace) -> None:
    place.built.mkdir()
    (place.built / "k-1.tar.gz").touch()
    assert place.sdist.name == "k-1.tar.gz"
    with pytest.raises(CheckError, match=r"0 files \*\.whl"):
        _ = place.wheel
    (place.built / "k-2.tar.gz").touch()
    with pytest.raises(CheckError, match=r"2 files \*\.tar\.gz"):
        _ = place.sdist
