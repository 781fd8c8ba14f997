"""The memory map of real servers in a browser: load, several instances, a loan, and a move.

``pytest -m long tests/server/map/test_server_map_lending.py --screenshots docs/images`` takes the
screenshots of the documents.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.llm.servers import PATIENCE_SECONDS, serving
from tests.server.map.chromium import BrowserPage
from tests.server.map.conftest import CUT, LIVE, load, needs_chromium

pytestmark = [needs_chromium, pytest.mark.long]

KV_MEMORY = "36MiB"
"""Of an instance: 1,632 tokens, three sections and a little."""
LONG_PROMPT = "The whale swam north. " * 520
TEXTS = "[...document.querySelectorAll('.loan-line strong')].map((line) => line.innerText)"
BETWEEN = "document.getElementById('between-list').innerText"
MOST_BYTES, MOST_COLOURS = 150_000, 256

Shoot = Callable[[str], None]


@pytest.fixture
def shoot(browser: BrowserPage, tmp_path: Path, request: pytest.FixtureRequest) -> Shoot:
    """Take a screenshot: of the documents if their folder is given."""
    folder = request.config.getoption("screenshots") or tmp_path

    def shot(name: str) -> None:
        path = folder / f"memory-map-{name}.png"
        browser.screenshot(path)
        Image.open(path).convert("RGB").quantize(MOST_COLOURS, dither=Image.Dither.NONE).save(
            path, optimize=True
        )
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and 10_000 < len(content) < MOST_BYTES

    return shot


@contextlib.contextmanager
def served_page(browser: BrowserPage, cache_dir: Path, *flags: str) -> Iterator[str]:
    """A server whose map is open; whatever the browser complains about fails the test."""
    with serving(cache_dir, *flags) as served:
        browser.problems.clear()
        browser.size(1200, 1000)
        browser.open(f"{served.url}/")
        browser.wait_for(LIVE)
        yield served.url
        assert browser.problems == []
        browser.open("about:blank")


def test_one_instance_idle_and_under_load(
    browser: BrowserPage, smollm2_path: Path, shoot: Shoot
) -> None:
    with served_page(browser, smollm2_path.parent, "--kv-memory", "64MiB") as url:
        assert browser.evaluate("document.getElementById('between').hidden")
        assert "borrowed" not in browser.evaluate("document.querySelector('.legend').innerText")
        browser.wait_for("window.kvellMap.history.rows.length > 5")
        shoot("idle")
        with load(url, 6, max_tokens=1500):
            browser.wait_for("document.querySelectorAll('#requests td.id').length === 6", 60)
            browser.wait_for("window.kvellMap.history.rows.at(-1).output_tokens > 600", 120)
            shoot("load")
            assert browser.evaluate(CUT) == []


def test_instances_lend_memory_and_requests_move(
    browser: BrowserPage, smollm2_path: Path, shoot: Shoot
) -> None:
    flags = ("--instances", "mixed=3", "--kv-memory", KV_MEMORY)
    with served_page(browser, smollm2_path.parent, *flags) as url:
        legend = browser.evaluate("document.querySelector('.instance .legend').innerText")
        assert "borrowed section" in legend and "lent" in legend
        assert "no loans, moves or pulls" in browser.evaluate(BETWEEN)
        with load(url, 6, max_tokens=400):
            browser.wait_for("document.querySelectorAll('#requests td.id').length === 6", 60)
            browser.wait_for("window.kvellMap.history.rows.at(-1).output_tokens > 300", 120)
            shoot("instances")
        browser.wait_for("window.kvellMap.latest.requests.running === 0", 60)
        with load(url, 1, max_tokens=600, prompt=LONG_PROMPT):
            browser.wait_for("document.querySelectorAll('.loan.borrowed').length >= 2", 120)
            browser.wait_for("window.kvellMap.latest.requests.rows[0]?.output_tokens > 20", 120)
            check_loan(browser)
            shoot("loan")
            browser.size(500, 1200)
            assert browser.evaluate("document.documentElement.scrollWidth") == 500
            assert browser.evaluate(CUT) == []
            browser.size(1200, 1000)
        browser.wait_for("document.querySelectorAll('.loan').length === 0", 60)
        lent = "/mixed-[0-2] → mixed-[0-2]: [0-9]+ sections? lent in the last three minutes/"
        browser.wait_for(f"{lent}.test({BETWEEN})", 10)
        with load(url, 1, max_tokens=1200):
            source = browser.wait_for(
                "(({ output_tokens, instance } = {}) => output_tokens > 4 && instance)"
                "(window.kvellMap.latest.requests.rows[0])"
            )
            answer = httpx.post(
                f"{url}/cluster/drain", json={"id": source}, timeout=PATIENCE_SECONDS
            )
            assert answer.status_code == httpx.codes.ACCEPTED, answer.text
            moved = f"/{source} → mixed-[0-2]: 1 request moved in the last three minutes/"
            browser.wait_for(f"{moved}.test({BETWEEN})", 60)


def check_loan(browser: BrowserPage) -> None:
    """Both sides show a loan: as cells, and with the other's name."""
    loans = browser.evaluate(
        "Object.fromEntries(window.kvellMap.latest.instances.map((i) => [i.id, i.loans]))"
    )
    (debtor,) = [name for name, loan in loans.items() if loan["borrows"]]
    texts = browser.evaluate(TEXTS)
    for loan in loans[debtor]["borrows"]:
        creditor, sections = loan["peer"], loan["sections"]
        assert f"borrows {sections} from {creditor}" in texts
        assert f"lends {sections} to {debtor}" in texts
        assert f"{creditor} lends {sections} to {debtor}" in browser.evaluate(BETWEEN)
        at = f"document.querySelector('[data-instance={debtor}] [data-peer={creditor}]')"
        assert browser.evaluate(f"{at}.querySelectorAll('.loan.borrowed').length") == sections
        cells = f"Number(document.querySelector('[data-instance={creditor}] .cells').dataset.lent)"
        assert browser.evaluate(cells) >= sections
    colour = "getComputedStyle(document.documentElement).getPropertyValue('--loan').trim()"
    lent = "window.kvellMap.views.get('%s').columns.lent.findIndex((pages) => pages > 0)"
    creditor = loans[debtor]["borrows"][0]["peer"]
    pixel = browser.evaluate(
        f"""(() => {{
          const map = window.kvellMap.views.get("{creditor}").cells;
          const [x, y] = map.place({lent % creditor});
          const data = map.canvas.getContext("2d").getImageData(x + 2, y + 2, 1, 1).data;
          return "#" + [...data].slice(0, 3).map((c) => c.toString(16).padStart(2, "0")).join("");
        }})()"""
    )
    assert pixel == browser.evaluate(colour)
