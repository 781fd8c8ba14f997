"""The memory map of real servers in a browser: load, several instances, a loan, and a move.

``pytest -m long tests/server/map/test_server_map_lending.py --screenshots docs/images`` takes the
screenshots of the documents.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.llm.servers import PATIENCE_SECONDS, serving
from tests.server.map.chromium import BrowserPage
from tests.server.map.conftest import CUT, LIVE, load, needs_chromium

pytestmark = [needs_chromium, pytest.mark.long]

KV_MEMORY = "36MiB"
"""Of an instance: 1,632 tokens, three sections and a little."""
LONG_PROMPT = "The whale swam north. " * 520
TEXTS = "[...document.querySelectorAll('.loan-line strong')].map((line) => line.innerText)"
BETWEEN = "document.getElementById('between-list').innerText"
MOST_BYTES = 150_000

Shoot = Callable[[str], None]


@pytest.fixture
def shoot(browser: BrowserPage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shoot]:
    """Take a screenshot: of the documents if their folder is given."""
    folder = request.config.getoption("screenshots") or tmp_path

    def shot(name: str) -> None:
        path = folder / f"memory-map-{name}.png"
        browser.screenshot(path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and 10_000 < len(content) < MOST_BYTES

    browser.problems.clear()
    browser.size(1200, 1000)
    yield shot
    assert browser.problems == []


def open_page(browser: BrowserPage, url: str) -> None:
    browser.open(f"{url}/")
    browser.wait_for(LIVE)


def test_one_instance_idle_and_under_load(
    browser: BrowserPage, smollm2_path: Path, shoot: Shoot
) -> None:
    with serving(smollm2_path.parent, "--kv-memory", "64MiB") as served:
        open_page(browser, served.url)
        assert browser.evaluate("document.getElementById('between').hidden")
        assert "borrowed" not in browser.evaluate("document.querySelector('.legend').innerText")
        browser.wait_for("window.kvellMap.history.rows.length > 5")
        shoot("idle")
        with load(served.url, 6, max_tokens=1500):
            browser.wait_for("document.querySelectorAll('#requests td.id').length === 6", 60)
            browser.wait_for("window.kvellMap.history.rows.at(-1).output_tokens > 600", 120)
            shoot("load")
        assert browser.evaluate(CUT) == []


def test_instances_lend_memory_and_requests_move(
    browser: BrowserPage, smollm2_path: Path, shoot: Shoot
) -> None:
    flags = ("--instances", "mixed=3", "--kv-memory", KV_MEMORY)
    with serving(smollm2_path.parent, *flags) as served:
        open_page(browser, served.url)
        legend = browser.evaluate("document.querySelector('.instance .legend').innerText")
        assert "borrowed section" in legend and "lent" in legend
        assert "no loans now" in browser.evaluate(BETWEEN)
        with load(served.url, 6, max_tokens=400):
            browser.wait_for("document.querySelectorAll('#requests td.id').length === 6", 60)
            browser.wait_for("window.kvellMap.history.rows.at(-1).output_tokens > 300", 120)
            shoot("instances")
        browser.wait_for("window.kvellMap.latest.requests.running === 0", 60)
        with load(served.url, 1, max_tokens=600, prompt=LONG_PROMPT):
            browser.wait_for("document.querySelectorAll('.loan.borrowed').length >= 2", 120)
            browser.wait_for("window.kvellMap.latest.requests.rows[0]?.output_tokens > 20", 120)
            check_loan(browser)
            shoot("loan")
            browser.size(500, 1200)
            assert browser.evaluate("document.documentElement.scrollWidth") == 500
            assert browser.evaluate(CUT) == []
            browser.size(1200, 1000)
        browser.wait_for("document.querySelectorAll('.loan').length === 0", 60)
        with load(served.url, 1, max_tokens=1200):
            source = browser.wait_for(
                "(({ output_tokens, instance } = {}) => output_tokens > 4 && instance)"
                "(window.kvellMap.latest.requests.rows[0])"
            )
            answer = httpx.post(
                f"{served.url}/cluster/drain", json={"id": source}, timeout=PATIENCE_SECONDS
            )
            assert answer.status_code == httpx.codes.ACCEPTED, answer.text
            browser.wait_for(f"{BETWEEN}.includes('requests move: 1 in three minutes')", 60)
            assert browser.evaluate(BETWEEN).startswith(f"{source} → mixed-")


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
