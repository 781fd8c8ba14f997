"""``kvell serve``: flags of keys and of the log reach the server, and the log keeps to its form."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvell.server.api.door.http_bounds import HttpBounds
from kvell.server.logs.lines import tell
from kvell.server.text.served_text import ServedText

Kvell = Callable[..., Any]
logger = logging.getLogger("kvell.server.anything")


class Served:
    """A fake HTTP server that logs, announces itself and shows a contract."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def __call__(
        self, command: Any, texts: Any, options: Any, announce: Any, show_contract: Any
    ) -> None:
        self.options.append(options)
        show_contract(["mixed-0 1 GiB", "all 2 GiB"])
        announce("http://127.0.0.1:8000")
        tell(logger, logging.INFO, "server_started", url="http://127.0.0.1:8000")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    stand_in = Served()
    monkeypatch.setattr("kvell.server.run.serve", stand_in)
    monkeypatch.setattr(ServedText, "load", lambda name, path, *_: f"text of {name} in {path}")
    monkeypatch.setattr(
        "kvell.models.sources.source.resolve_model", lambda model, *_: Path(f"where {model} is")
    )
    return stand_in


def test_without_flags_nobody_needs_a_key_and_statistics_are_told(
    kvell: Kvell, served: Served
) -> None:
    assert kvell("serve").code == 0
    [options] = served.options
    assert (options.api_key, options.api_key_file, options.guard_metrics) == (None, None, False)
    assert (options.log_requests, options.stats_seconds) == (False, 10.0)
    assert options.http == HttpBounds(max_connections=4096, keep_alive_seconds=5)


def test_all_flags_arrive(kvell: Kvell, served: Served) -> None:
    flags = ["--api-key", "one", "--api-key-file", "some/keys.toml", "--guard-metrics"]
    flags += ["--max-connections", "100", "--keep-alive-seconds", "75"]
    flags += ["--log-requests", "--stats-seconds", "2.5", "--max-in-flight-per-key", "7"]
    assert kvell("serve", *flags).code == 0
    [options] = served.options
    assert (options.api_key, options.api_key_file) == ("one", Path("some/keys.toml"))
    assert options.guard_metrics
    assert options.max_in_flight_per_key == 7
    assert (options.log_requests, options.stats_seconds) == (True, 2.5)
    assert options.http == HttpBounds(max_connections=100, keep_alive_seconds=75)


@pytest.mark.parametrize(
    "flags",
    [
        ("--stats-seconds", "-1"),
        ("--log-format", "xml"),
        ("--api-key-file",),
        ("--max-connections", "9"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    kvell: Kvell, served: Served, flags: tuple[str, ...]
) -> None:
    ended = kvell("serve", *flags)
    assert ended.code == 2
    assert flags[0] in ended.stderr
    assert served.options == []


def test_text_is_for_people(kvell: Kvell, served: Served) -> None:
    ended = kvell("serve")
    *_, first, second, announced, logged = ended.stderr.splitlines()
    assert (first, second) == ("mixed-0 1 GiB", "all 2 GiB")
    assert announced == "kvell: serving http://127.0.0.1:8000/v1 (Ctrl-C ends it)"
    assert logged.endswith("INFO server_started url=http://127.0.0.1:8000")


def test_json_has_nothing_else_among_its_lines(kvell: Kvell, served: Served) -> None:
    ended = kvell("serve", "--log-format", "json")
    contract, started = [json.loads(line) for line in ended.stderr.splitlines()]
    assert contract["event"] == "memory_contract"
    assert contract["lines"] == ["mixed-0 1 GiB", "all 2 GiB"]
    assert (started["event"], started["url"]) == ("server_started", "http://127.0.0.1:8000")
    assert ended.stdout == ""


def test_json_on_stdout_is_the_address_alone(kvell: Kvell, served: Served) -> None:
    ended = kvell("serve", "--log-format", "json", "--json")
    assert json.loads(ended.stdout)["url"] == "http://127.0.0.1:8000"
    assert len(ended.stderr.splitlines()) == 2


def test_a_wrong_key_file_is_one_line_and_starts_nothing(
    kvell: Kvell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "kvell.models.sources.source.resolve_model", lambda model, *_: Path(f"where {model} is")
    )
    path = tmp_path / "keys.toml"
    path.write_text('[[keys]]\nname = "a"\n')
    ended = kvell("serve", "--api-key-file", str(path))
    assert ended.code == 2
    assert ended.stderr.splitlines()[-1] == (
        "kvell: keys[0].key=neither: is needed in one form; give exactly one of key and sha256"
    )
