"""The quickstart does what it says: its commands and snippets, in order, against one server."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from kvell.cli import main
from kvell.cli.terminal.session import Session
from kvell.device.available import available_bytes
from tests.docs.fences import DOCS, Block, blocks_in

PATIENCE_SECONDS = 120.0
URL = "http://127.0.0.1:8000"
BLOCKS = blocks_in("quickstart.md")
PYTHON = [one for one in BLOCKS if one.language == "python"]
COMMANDS = [command for one in BLOCKS if one.language == "console" for command in one.commands]
SERVE = "kvell serve "
TAKEN_ON_TRUST = ("make run", "source ")
"""They install; whoever runs this has done so."""


@dataclass
class Reader:
    """Somebody who types what the file says, against a server at another address."""

    url: str
    home: Path
    names: dict[str, Any] = field(default_factory=dict)

    def run(self, command: str) -> str:
        """What a command prints; Kvell's own run in this process, which has torch already."""
        words = shlex.split(command.replace(URL, self.url))
        if words[0] == "kvell":
            talks = words[1] in ("top", "cluster")
            return self._run_kvell([*words[1:], *(["--url", self.url] if talks else [])])
        done = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        return done.stdout

    def _run_kvell(self, arguments: list[str]) -> str:
        printed = io.StringIO()
        session = Session(self.home / ".cache" / "kvell", available_bytes=available_bytes)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            assert main.run(arguments, session) == 0, printed.getvalue()
        return printed.getvalue()

    def execute(self, block: Block) -> str:
        """What a Python block prints; later blocks know its names."""
        place = f"{DOCS / 'quickstart.md'}:{block.line}"
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text.replace(URL, self.url), place, "exec"), self.names)
        return printed.getvalue()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A home whose cache has the converted model, as after ``make run``."""
    found = tmp_path_factory.mktemp("home")
    (found / ".cache").mkdir()
    (found / ".cache" / "kvell").symlink_to(smollm2_path.parent)
    return found


@pytest.fixture(scope="module")
def reader(home: Path) -> Iterator[Reader]:
    """Of a server that was started as the file says, only at a free port."""
    [told] = [one for one in COMMANDS if one.startswith(SERVE)]
    words = shlex.split(told.replace("--port 8000", "--port 0"))[1:]
    command = [sys.executable, "-m", "kvell.cli.main", *words, "--json"]
    environment = os.environ | {"HOME": str(home)}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        ) as process,
        pytest.MonkeyPatch.context() as patch,
    ):  # fmt: skip
        patch.setenv("HOME", str(home))
        patch.chdir(DOCS.parent)
        assert process.stdout is not None
        yield Reader(json.loads(process.stdout.readline())["url"], home)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


def answers_both_prompts(printed: str, names: dict[str, Any]) -> bool:
    lines = printed.splitlines()
    return "Paris" in lines[0] and "Rome" in lines[1] and len(printed.split("\n", 2)[2]) > 4


def shows_a_stream(printed: str, names: dict[str, Any]) -> bool:
    return len(printed) > 20


def obeys_the_schema(printed: str, names: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(printed), names["schema"])
    return True


def calls_the_tool(printed: str, names: dict[str, Any]) -> bool:
    name, arguments = printed.split(" ", 1)
    jsonschema.validate(json.loads(arguments), names["weather"]["parameters"])
    return name == "weather"


def hits_the_second_time(printed: str, names: dict[str, Any]) -> bool:
    first, second = [[int(n) for n in re.findall(r"\d+", line)] for line in printed.splitlines()]
    return first[1] < first[0] / 10 and second[1] > second[0] / 2


def is_refused_by_name(printed: str, names: dict[str, Any]) -> bool:
    return printed.startswith("messages[0].content=image_url: is not accepted by this model")


SHOWN: dict[str, Callable[[str, dict[str, Any]], bool]] = {
    "In Python": answers_both_prompts,
    "A stream": shows_a_stream,
    "Answers in a form": obeys_the_schema,
    "A tool call": calls_the_tool,
    "Cached tokens": hits_the_second_time,
    "An image": is_refused_by_name,
}
"""What the block under each heading must show."""

SAID = {
    "kvell generate": "memory contract for smollm2",
    "kvell plan": "Requests, while decoding",
    "kvell top": "mixed-0",
    "kvell cluster": "routing least-load",
    f"curl {URL}/v1/chat/completions": '"object":"chat.completion"',
    f"curl {URL}/metrics": "# TYPE kvell:num_requests_running gauge",
}
"""What the commands that begin so say."""


@pytest.mark.long
def test_every_snippet_shows_what_it_is_there_for(reader: Reader) -> None:
    assert [one.heading for one in PYTHON] == list(SHOWN)
    for block in PYTHON:
        printed = reader.execute(block)
        assert SHOWN[block.heading](printed, reader.names), (block.heading, printed)


SLOW = ("kvell generate", "kvell plan")
"""They read a model themselves; others ask the server."""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.long if command.startswith(SLOW) else ())
        for command in COMMANDS
    ],
)
def test_every_command_does_what_it_says(reader: Reader, command: str) -> None:
    if command.startswith((SERVE, *TAKEN_ON_TRUST)):
        return
    [said] = [text for start, text in SAID.items() if command.startswith(start)]
    assert said in reader.run(command)


def test_the_page_that_a_browser_opens_is_the_memory_map(reader: Reader) -> None:
    assert f"Open `{URL}/` in a browser" in (DOCS / "quickstart.md").read_text()
    assert "<!doctype html>" in httpx.get(f"{reader.url}/").text


def test_links_lead_somewhere() -> None:
    for name in ("quickstart.md", "operations.md"):
        text = (DOCS / name).read_text()
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            found = (DOCS / path) if path else (DOCS / name)
            assert found.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.+)$", found.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
                assert anchor in slugs, target
