"""Servers over real engine cores, as processes; and a browser."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.map.chromium import BrowserPage, browser_page, find_chromium

LIVE = "window.kvellMap && window.kvellMap.polls > 0"
CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)
CUT = """(() => {
  const boxes = [...document.querySelectorAll("section, table, .wide, .legend, dl, details")];
  const cut = boxes.filter((box) => box.scrollWidth > box.clientWidth + 1
    || box.getBoundingClientRect().right > innerWidth + 1);
  return cut.map((box) => `${box.tagName} ${box.id} ${box.className}`);
})()"""
"""Boxes whose content is wider than they are, or that go beyond the window."""

StartMap = Callable[..., contextlib.AbstractContextManager[str]]


@pytest.fixture(scope="session")
def start_map() -> StartMap:
    """Start a server of one's own: ``with start_map(key, instances, …) as url``."""

    @contextlib.contextmanager
    def started(key: str = "-", instances: int = 1, *arguments: str) -> Iterator[str]:
        script = str(Path(__file__).with_name("map_server.py"))
        command = [sys.executable, script, key, str(instances), *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield process.stdout.readline().strip()
            finally:
                process.terminate()
                process.wait(timeout=30)

    return started


@pytest.fixture(scope="module")
def map_url(start_map: StartMap) -> Iterator[str]:
    """A server over two instances with 400 large pages each."""
    with start_map("-", 2, "--large-pages", "400", "--step-seconds", "0.005") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[BrowserPage]:
    assert CHROMIUM is not None
    with browser_page(CHROMIUM) as page:
        page.size(1400, 1200)
        yield page


@contextlib.contextmanager
def load(url: str, requests: int, max_tokens: int = 3000, prompt: str = "") -> Iterator[None]:
    """Requests that run until the context ends."""
    stop = threading.Event()

    def stream(number: int) -> None:
        text = prompt or f"request {number} " * 50
        body = {"prompt": text, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
            for _ in answer.iter_lines():
                if stop.is_set():
                    return

    clients = [threading.Thread(target=stream, args=(number,)) for number in range(requests)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join(30)
