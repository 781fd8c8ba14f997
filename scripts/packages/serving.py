"""``kvell serve``: it starts, answers, and ends at SIGTERM."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from scripts.packages.checks import CheckError, demand
from scripts.packages.workplace import Workplace

START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
END_SECONDS = 90.0
"""More than a server may take to let requests end."""
FLAGS = ("--port", "0", "--json", "--model", "smollm2", "--kv-memory", "64MiB")
PLACES = ("/*STYLE*/", "/*SCRIPT*/")
"""Where the memory map's files are put into its page."""


def check_serve(place: Workplace) -> str:
    """Serve with the environment's ``kvell``, ask, and end it."""
    command = [str(place.programs / "kvell"), "serve", *FLAGS]
    return check_server(command, place.folder, place.environment)


def check_server(command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Start a server that prints its URL as JSON; ask it for everything, then end it.

    :raises CheckError: if it does not start, answers wrongly, or ends with another code than 0.
    """
    log = folder / "serve.log"
    with log.open("wb") as errors, _started(command, folder, environment, errors) as process:
        try:
            url = _url(process)
            found = [_health(url), _memory_map(url), _completion(url)]
        except CheckError as failure:
            raise CheckError(f"{failure}\n{_end_of(log)}") from failure
        process.terminate()
        try:
            code = process.wait(END_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise CheckError(f"did not end within {END_SECONDS:g} s of SIGTERM") from late
    demand(code == 0, f"ended with {code} at SIGTERM\n{_end_of(log)}")
    return "; ".join([*found, "SIGTERM ends it with 0"])


@contextlib.contextmanager
def _started(
    command: Sequence[str], folder: Path, environment: dict[str, str], errors: Any
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the server; whatever happens, it is gone afterwards."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _url(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the line with the URL; killing a server that says nothing ends its pipe."""
    assert process.stdout is not None
    watch = threading.Timer(START_SECONDS, process.kill)
    watch.start()
    try:
        line = process.stdout.readline()
    finally:
        watch.cancel()
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckError(f"said no URL, but {line!r}") from error


def _health(url: str) -> str:
    state = json.loads(_asked(url, "/health"))
    demand(state == {"status": "serving"}, f"/health says {state}")
    return "/health"


def _memory_map(url: str) -> str:
    """The page, with styles and scripts in it."""
    page = _asked(url, "/").decode()
    demand("<html" in page, f"/ is no page, but {page[:80]!r}")
    left = [place for place in PLACES if place in page]
    demand(not left, f"/ lacks what belongs in {left}")
    return f"/ ({len(page) >> 10} KiB)"


def _completion(url: str) -> str:
    asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8}
    answer = json.loads(_asked(url, "/v1/completions", {**asked, "temperature": 0}))
    text = answer["choices"][0]["text"]
    demand("Paris" in text, f"the completion is {text!r}")
    return "/v1/completions"


def _asked(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    content = None if body is None else json.dumps(body).encode()
    request = Request(urljoin(url, path), content, {"content-type": "application/json"})
    try:
        with urlopen(request, timeout=ANSWER_SECONDS) as response:
            answer: bytes = response.read()
            return answer
    except (URLError, OSError) as error:  # HTTP's errors too
        raise CheckError(f"{path}: {error}") from error


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
