"""``kvell top``: what it shows of a look, and that it looks at a real server."""

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from kvell.cli.top.screen import (
    BAR_CELLS,
    CACHED,
    FREE,
    MOST_REQUESTS,
    USED,
    WITHHELD,
    IdleSpell,
    Instance,
    InstancePages,
    InstanceStats,
    Miss,
    Request,
    Requests,
    ServerSnapshot,
    Uses,
    memory_bar,
    read,
    screen,
    sections_text,
    threads_text,
    tokens_per_second,
)
from kvell.errors import ChangeSomething

Kvell = Callable[..., Any]
MIB = 1 << 20


def stats(used: int = 1, cached: int = 2, withheld: int = 0, output: int = 10) -> InstanceStats:
    uses = Uses(8 * MIB, used * MIB, cached * MIB, withheld * MIB)
    return InstanceStats(3, 1, uses, 100, 40, output, 90, 5)


def seen(at_seconds: float = 1.0, told: InstanceStats | None = None, **more: Any) -> ServerSnapshot:
    instance = Instance("mixed-0", "serving", 0, 4711, told, **more)
    return ServerSnapshot(at_seconds, (instance,), Requests(0, 0))


def shown(one: ServerSnapshot, before: ServerSnapshot | None = None) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen(one, before))
    return console.export_text()


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_a_bar_has_one_length_and_shows_all_there_is(used: int, cached: int, withheld: int) -> None:
    if used + cached + withheld > 8:
        return
    bar = memory_bar(stats(used, cached, withheld))
    assert len(bar) == BAR_CELLS
    for sign, size in ((USED, used), (CACHED, cached), (WITHHELD, withheld)):
        assert abs(bar.count(sign) - BAR_CELLS * size / 8) <= 2
        assert (sign in bar) == bool(size) or used + cached + withheld == 8
    assert (FREE in bar) == (used + cached + withheld < 8)


def team(threads: int, had: float, lost: float) -> dict[str, float]:
    return {"threads": threads, "shared": 0, "thread_seconds": had, "lost_seconds": lost}


def test_threads_and_what_others_took_of_their_time_are_shown() -> None:
    assert threads_text({}, {}) == "–"
    assert threads_text(team(2, 0.0, 0.0), {}) == "2"
    assert threads_text(team(2, 10.0, 0.01), {}) == "2"
    assert threads_text(team(2, 10.0, 2.5), {}) == "2 −25%"
    assert threads_text(team(2, 20.0, 3.5), team(2, 10.0, 2.5)) == "2 −10%"
    restarted = threads_text(team(4, 2.0, 1.0), team(4, 10.0, 2.5))
    assert restarted == "4 −50%"
    now, then = (seen(told=replace(stats(), team=team(2, had, 1.0))) for had in (3.0, 1.0))
    assert "2 −33%" in shown(now)
    assert "−" not in shown(now, then)


def test_sections_that_instances_lend_each_other_are_shown() -> None:
    assert sections_text({}) == sections_text({"lent": 0, "borrowed": 0, "lost": 0}) == "–"
    assert sections_text({"lent": 2}) == "2 lent"
    recalled = {"borrowed": 6, "returned": 1, "replaced": 2, "lost": 3}
    assert sections_text(recalled) == "6 borrowed, 6 recalled"
    assert "1,200 lent" in shown(seen(told=replace(stats(), sections={"lent": 1200})))


def test_an_empty_pool_is_free() -> None:
    assert memory_bar(stats(0, 0)) == FREE * BAR_CELLS


def test_rates_are_between_two_looks_of_one_incarnation() -> None:
    before, now = seen(1.0, stats(output=10)), seen(3.0, stats(output=50))
    assert tokens_per_second(now, before, "mixed-0") == 20.0
    assert tokens_per_second(now, None, "mixed-0") is None
    assert tokens_per_second(now, before, "mixed-1") is None
    assert tokens_per_second(seen(3.0, stats(output=2)), before, "mixed-0") is None
    assert tokens_per_second(seen(1.0, stats(output=50)), before, "mixed-0") is None


def test_an_instance_is_one_row() -> None:
    text = shown(seen(3.0, stats(output=50)), seen(1.0, stats(output=10)))
    [row] = [line for line in text.splitlines() if "mixed-0" in line]
    for word in ("serving", "8 MiB", "40%", "20", "5"):
        assert word in row


def test_a_silent_instance_says_so() -> None:
    assert "no answer" in shown(seen())


def test_requests_and_how_many_are_left_out() -> None:
    rows = tuple(
        Request(f"r{number}", "mixed-0", "running", 12, number, 1.5, 0.25, 0.0314)
        for number in range(MOST_REQUESTS + 5)
    )
    waiting = Request("last", "", "waiting", 7, 0, 0.1)
    one = ServerSnapshot(0.0, (), Requests(30, 4, (waiting, *rows)))
    text = shown(one)
    assert "(and 14 more)" in text and "250 ms" in text and "31.4 ms" in text
    assert "r18" in text and "r19" not in text


def test_requests_that_wait_beside_idle_instances_come_first() -> None:
    spell = IdleSpell(3, 14.4, "no instance accepts any")
    text = shown(replace(seen(), requests=Requests(0, 3, idle_wait=spell)))
    told = "3 requests wait for 14 s although every instance is idle: no instance accepts any"
    assert text.startswith(told)


def test_misses_are_counted_by_reason() -> None:
    misses = tuple(Miss(reason) for reason in ("evicted", "never_seen", "evicted"))
    text = shown(seen(1.0, stats(), pages=InstancePages(misses)))
    assert "why the last 3 misses missed: evicted 2, never seen 1" in text
    assert "no prompt missed" in shown(seen())


@pytest.mark.parametrize("body", [b"", b"[]", b'{"at_seconds": 1}', b"\xff"])
def test_what_no_server_of_ours_says_is_refused(body: bytes) -> None:
    with pytest.raises(ChangeSomething, match="another form"):
        read(body)


def test_a_server_that_is_not_there_is_named(kvell: Kvell) -> None:
    refused = kvell("top", "--once", "--url", "http://127.0.0.1:9")
    assert refused.code == 2 and "does not answer" in refused.stderr
