"""The memory map in a browser, under load: cells change as requests come and go."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.map.chromium import BrowserPage
from tests.server.map.conftest import CUT, LIVE, StartMap, load, needs_chromium

KEY = "the-operators-key-of-this-test"
USED = "Object.values(window.kvellMap.counts()).reduce((n, one) => n + (one ? one.used : 0), 0)"
CACHED = USED.replace("one.used", "one.cached")

pytestmark = needs_chromium


@pytest.fixture
def page(browser: BrowserPage, map_url: str) -> Iterator[BrowserPage]:
    """The map, live; whatever the browser complains about fails the test."""
    browser.problems.clear()
    browser.open(f"{map_url}/")
    browser.wait_for(LIVE)
    yield browser
    assert browser.problems == []


def pixels(page: BrowserPage) -> list[str]:
    """The colours of the first map's cells, at their middles."""
    found: list[str] = page.evaluate(
        """(() => {
          const map = window.kvellMap.views.get("mixed-0").cells;
          const context = map.canvas.getContext("2d");
          return Array.from({ length: map.columns.length }, (_, i) => {
            const [x, y] = map.place(i).map((place) => place + map.size * 0.3);
            return Array.from(context.getImageData(x, y, 1, 1).data).join();
          });
        })()"""
    )
    return found


def figure(name: str) -> str:
    return f"document.querySelector('#figures [data-figure={name}]').innerText"


def test_the_line_at_the_top_shows_the_server(page: BrowserPage, map_url: str) -> None:
    assert page.evaluate(figure("model")) == "fake"
    assert page.evaluate(figure("dtype")) == "float32"
    assert re.fullmatch("[0-9.]+ [KMGT]iB", page.evaluate(figure("memory")))
    page.wait_for(f"{figure('running')} === '0'")
    with load(map_url, 3):
        page.wait_for(f"{figure('running')} === '3'")
        assert page.evaluate(figure("waiting")) == "0"
        for name in ("in", "out"):
            page.wait_for(f"Number({figure(name)}.replace(',', '')) > 0")
        for name in ("ttft", "tpot"):
            page.wait_for(f"/^[0-9.]+ m?s$/.test({figure(name)})")
        tops = page.evaluate(
            "['#figures', '#requests', '.cells'].map("
            "(at) => document.querySelector(at).getBoundingClientRect().top)"
        )
        assert tops == sorted(tops), "requests are above the grids"
    links = "[...document.querySelectorAll('#links a')].map((a) => a.getAttribute('href'))"
    assert page.evaluate(links) == ["metrics", "docs"]


def test_a_page_of_500_pixels_has_no_cut_tables(page: BrowserPage, map_url: str) -> None:
    page.size(500, 1200)
    try:
        with load(map_url, 4):
            page.wait_for("document.querySelectorAll('#requests td.id').length === 4")
            page.wait_for("document.querySelectorAll('.misses td.id').length >= 4")
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") == 500
            assert page.evaluate(CUT) == []
            shown = page.evaluate("document.querySelector('#requests tbody').innerText")
            assert "running" in shown or "prefilling" in shown
    finally:
        page.size(1400, 1200)


def test_a_page_that_is_opened_has_the_history_of_before(page: BrowserPage, map_url: str) -> None:
    rows = "window.kvellMap.history.rows"
    page.wait_for(f"{rows}.length >= 4")
    last = page.evaluate(f"{rows}.at(-1).at_seconds")
    page.open(f"{map_url}/")
    page.wait_for(LIVE)
    assert page.evaluate(f"{rows}.filter((row) => row.at_seconds <= {last}).length") >= 4
    assert page.evaluate(f"{rows}.at(-1).instances['mixed-0'].pool") > 0


def test_entries_of_legends_are_explained_and_fit_the_server(page: BrowserPage) -> None:
    entries = "[...document.querySelectorAll('.instance .legend summary')].map((s) => s.innerText)"
    legend = page.evaluate(entries)
    assert any("withheld for activations" in entry for entry in legend)
    assert all("?" in entry for entry in legend)
    assert not [entry for entry in legend if "borrowed" in entry or "CPU buffer" in entry]
    page.evaluate("document.querySelector('.instance .legend summary').focus()")
    page.press("Enter")
    text = "document.querySelector('.instance .legend details[open] p')?.innerText"
    assert page.wait_for(text).startswith("Pages of this layer group")
    page.wait_for("window.kvellMap.polls > 3")
    assert page.evaluate(text), "it stays open while figures change"


def test_cells_change_as_requests_come_and_go(page: BrowserPage, map_url: str) -> None:
    page.wait_for(f"{USED} === 0")
    before = pixels(page)
    with load(map_url, 8):
        page.wait_for(f"{USED} > 40")
        during = pixels(page)
        assert during != before and len(set(during)) > len(set(before))
        page.wait_for("document.querySelectorAll('#requests tbody tr').length === 8")
        states = page.evaluate(
            "[...document.querySelectorAll('#requests tbody td:nth-child(3)')]"
            ".map((cell) => cell.textContent)"
        )
        assert set(states) <= {"running", "prefilling"}
    page.wait_for(f"{USED} === 0")
    page.wait_for(f"{CACHED} > 40")
    page.wait_for("window.kvellMap.latest.requests.running === 0")
    assert pixels(page) != during
    assert "no request now" in page.evaluate("document.querySelector('#requests').innerText")


@pytest.mark.long
def test_instances_stand_side_by_side_and_count_their_pages(page: BrowserPage) -> None:
    boxes = page.evaluate(
        "[...document.querySelectorAll('.instance')].map((s) => s.getBoundingClientRect().toJSON())"
    )
    assert len(boxes) == 2 and boxes[0]["top"] == boxes[1]["top"]
    assert boxes[0]["right"] <= boxes[1]["left"]
    data = page.evaluate("({...document.querySelector('.cells').dataset})")
    states = ("used", "cached", "withheld", "empty")
    assert sum(int(data[state]) for state in states) == int(data["total"]) == 400
    label = page.evaluate("document.querySelector('.cells').getAttribute('aria-label')")
    assert label.startswith("400 large pages of mixed-0: ")


@pytest.mark.long
def test_a_cell_is_looked_at_with_the_keyboard(page: BrowserPage, map_url: str) -> None:
    with load(map_url, 4):
        page.wait_for(f"{USED} > 20")
        page.evaluate("document.querySelector('.cells').focus()")
        at = "window.kvellMap.views.get('mixed-0').cells.at"
        across = page.evaluate("window.kvellMap.views.get('mixed-0').cells.across")
        moves = [("ArrowRight", 1), ("ArrowDown", 1 + across), ("ArrowLeft", across)]
        moves += [("ArrowUp", 0), ("ArrowUp", 0), ("End", 399), ("ArrowRight", 399), ("Home", 0)]
        for key, expected in moves:
            page.press(key)
            assert page.evaluate(at) == expected, key
        used = page.evaluate(
            "window.kvellMap.views.get('mixed-0').columns.used.findIndex((used) => used > 0)"
        )
        for _ in range(used):
            page.press("ArrowRight")
        text = "document.querySelector('.detail').innerText"
        page.wait_for(f"/cmpl-[0-9a-f]+-0: \\d+ page/.test({text})")
        shown = page.evaluate(text)
        assert shown.startswith(f"Large page {used}: used, group ")
        assert "free; " in shown and "In use now." in shown


@pytest.mark.long
def test_a_cell_is_looked_at_with_the_mouse(page: BrowserPage) -> None:
    box = page.evaluate("document.querySelector('.cells').getBoundingClientRect().toJSON()")
    size, across = page.evaluate(
        "(({ size, across }) => [size, across])(window.kvellMap.views.get('mixed-0').cells)"
    )
    page.point(box["left"] + 3.5 * size, box["top"] + 2.5 * size)
    expected = f"Large page {2 * across + 3}: "
    page.wait_for(f"document.querySelector('.detail').innerText.startsWith('{expected}')")


@pytest.mark.long
def test_timelines_and_tables_are_filled(page: BrowserPage, map_url: str) -> None:
    with load(map_url, 2):
        page.wait_for("document.querySelector('.misses tbody').innerText.includes('never seen')")
        labels = page.wait_for(
            "(() => { const l = [...document.querySelectorAll('figure:not([hidden]) canvas')]"
            ".map((c) => c.getAttribute('aria-label')); return l.every(Boolean) && l; })()"
        )
    assert len(labels) == 6
    assert labels[0].startswith("Tokens per second, last three minutes; now out: ")
    assert labels[2].startswith("KV memory, last three minutes; now used: ")
    assert "activations: " in labels[3] and "CPU buffer: " not in labels[3]
    groups = page.evaluate("document.querySelector('.groups tbody').innerText")
    assert "full" in groups and "sliding" in groups and "state" in groups


@pytest.mark.long
def test_a_paused_page_asks_for_nothing(page: BrowserPage) -> None:
    page.evaluate("document.getElementById('pause').click()")
    page.evaluate("new Promise((wake) => { setTimeout(wake, 700); })")
    polls = page.evaluate("window.kvellMap.polls")
    page.evaluate("new Promise((wake) => { setTimeout(wake, 1200); })")
    assert page.evaluate("window.kvellMap.polls") == polls
    page.evaluate("document.getElementById('pause').click()")
    page.wait_for(f"window.kvellMap.polls > {polls}")


@pytest.mark.long
def test_dark_and_light_are_different_and_a_narrow_page_does_not_scroll_sideways(
    page: BrowserPage,
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.size(400, 900, "dark")
    try:
        page.wait_for(f"{ground} !== '{light}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.evaluate(CUT) == []
    finally:
        page.size(1400, 1200)


@pytest.mark.long
def test_a_screenshot_can_be_taken(page: BrowserPage, tmp_path: Path) -> None:
    page.screenshot(tmp_path / "memory-map.png")
    content = (tmp_path / "memory-map.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


@pytest.mark.long
def test_the_page_asks_for_a_key_and_keeps_it_in_memory_only(
    browser: BrowserPage, start_map: StartMap
) -> None:
    with start_map(KEY, 1, "--large-pages", "100") as url:
        browser.open(f"{url}/")
        browser.wait_for("!document.getElementById('access').hidden")
        assert browser.evaluate("window.kvellMap.polls") == 0
        browser.evaluate("document.getElementById('key').focus()")
        browser.type("a wrong key")
        browser.evaluate("document.querySelector('#access button').click()")
        browser.wait_for("document.getElementById('status').innerText.includes('not accepted')")
        browser.evaluate("document.getElementById('key').focus()")
        browser.type(KEY)
        browser.evaluate("document.querySelector('#access button').click()")
        browser.wait_for(LIVE)
        assert browser.evaluate("document.getElementById('access').hidden")
        kept = "[localStorage.length, sessionStorage.length, document.body.innerHTML]"
        assert KEY not in json.dumps(browser.evaluate(kept))
        browser.open(f"{url}/")
        browser.wait_for("!document.getElementById('access').hidden")
    browser.open("about:blank")
    browser.problems.clear()
