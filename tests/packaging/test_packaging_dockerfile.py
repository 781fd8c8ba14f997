"""The Dockerfile copies what a build needs, and starts a guarded server that is not root."""

import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from scripts.packages.contents import FILES, FOLDERS
from tests.packaging.written import ROOT, Instruction, instructions_of, parameters_of, stages_of

INSTRUCTIONS = instructions_of((ROOT / "packaging" / "Dockerfile").read_text())
BUILD, RUNTIME = stages_of(INSTRUCTIONS)
NOT_NEEDED = {"CHANGELOG.md"}
"""Of the sdist, to build a wheel."""


def one(stage: list[Instruction], word: str) -> Instruction:
    [found] = [instruction for instruction in stage if instruction.word == word]
    return found


def copied() -> set[str]:
    texts = [instruction.text for instruction in BUILD if instruction.word == "COPY"]
    return {path.rstrip("/") for text in texts for path in text.split()[:-1]}


def test_the_build_has_all_sources() -> None:
    assert copied() == {*FILES, *FOLDERS} - NOT_NEEDED
    assert all((ROOT / path).exists() for path in copied())


def test_the_context_is_what_is_copied() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    assert {line[1:] for line in patterns if line.startswith("!")} == copied()


def test_every_version_is_pinned() -> None:
    environment = " ".join(item.text for item in BUILD if item.word == "ENV")
    assert "PIP_CONSTRAINT=/source/constraints.txt" in environment
    places = [place for place, item in enumerate(BUILD) if "pip install" in item.text]
    pins = next(place for place, item in enumerate(BUILD) if "constraints.txt ./" in item.text)
    assert places
    assert pins < min(places)


def test_build_tools_are_those_of_the_project() -> None:
    installed = next(item.text for item in BUILD if "scikit-build-core" in item.text)
    tools = installed.partition("pip install ")[2].partition(" &&")[0].split()
    assert {"scikit-build-core", "nanobind"} <= set(tools)


def test_the_default_command_is_a_server_with_keys_for_all_addresses() -> None:
    assert one(RUNTIME, "ENTRYPOINT").words == ["kvell"]
    taken = parameters_of(one(RUNTIME, "CMD").words)
    assert taken["host"] == "0.0.0.0"
    assert str(taken["api_key_file"]).startswith("/etc/kvell/")


def test_one_port_is_served_exposed_and_looked_at() -> None:
    port = parameters_of(one(RUNTIME, "CMD").words)["port"]
    assert one(RUNTIME, "EXPOSE").text == str(port)
    assert f"127.0.0.1:{port}/health" in one(RUNTIME, "HEALTHCHECK").text


def test_the_user_is_not_root_and_owns_the_cache() -> None:
    user = one(RUNTIME, "USER").text
    assert user.partition(":")[0].isdecimal()
    assert int(user.partition(":")[0]) > 0
    volume = one(RUNTIME, "VOLUME").text
    assert f"KVELL_CACHE_DIR={volume}" in one(RUNTIME, "ENV").text
    assert f"HF_HOME={volume}/" in one(RUNTIME, "ENV").text
    assert any(
        "--owner=kvell" in item.text and volume in item.text
        for item in RUNTIME
        if item.word == "RUN"
    )


def test_both_stages_have_the_same_python() -> None:
    bases = {stage[0].text.split()[0] for stage in (BUILD, RUNTIME)}
    assert bases == {"${PYTHON_IMAGE}"}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert one(INSTRUCTIONS[:1], "ARG").text.startswith(f"PYTHON_IMAGE=python:{version}-")


@pytest.fixture(params=[200, 503])
def health(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    status: int = request.param

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield status, server.server_port
        server.shutdown()
        thread.join()


def test_the_health_check_fails_where_the_server_does_not_serve(health: tuple[int, int]) -> None:
    status, port = health
    python, *words = one(RUNTIME, "HEALTHCHECK").words
    assert python == "python"
    command = [sys.executable, *(word.replace("8000", str(port)) for word in words)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) is (status == 200)
