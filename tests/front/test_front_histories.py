"""Where sessions were, and whom a request asks."""

import pytest

from kvell.front.routes import FEWEST_TOKENS, Histories

LIVE = {"a": 1, "b": 2, "c": 3}


def histories(*noted: tuple[str, str, int]) -> Histories:
    found = Histories(3)
    for one in noted:
        found.note(*one, 100)
    return found


def test_the_latest_instance_of_a_session_is_asked() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    assert known.source("s", 500, "c", LIVE) == "b"
    known.note("s", "a", 1, 100)
    assert known.source("s", 500, "c", LIVE) == "a"


@pytest.mark.parametrize(
    ("session", "tokens", "chosen"),
    [("s", 500, "a"), ("other", 500, "c"), ("", 500, "c"), ("s", FEWEST_TOKENS - 1, "c")],
    ids=["it was here", "another session", "no session", "a short prompt"],
)
def test_nobody_is_asked(session: str, tokens: int, chosen: str) -> None:
    known = histories(("s", "a", 1), ("", "a", 1))
    assert known.source(session, tokens, chosen, LIVE) == ""


def test_an_instance_that_began_again_knows_nothing() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    assert known.source("s", 500, "c", {"a": 1, "b": 7, "c": 3}) == "a"
    assert known.source("s", 500, "c", {"c": 3}) == ""
    known.note("s", "c", 2, 100)
    assert known.source("s", 500, "c", LIVE) == "b"


def test_only_so_many_sessions_are_remembered() -> None:
    known = histories(*((f"s{number}", "a", 1) for number in range(3)))
    known.note("s0", "b", 2, 100)
    known.note("s3", "a", 1, 100)
    assert len(known) == 3
    assert known.source("s1", 500, "c", LIVE) == ""
    assert known.source("s0", 500, "c", LIVE) == "b"


def test_what_each_instance_has_of_a_session_is_its_latest_text() -> None:
    known = histories(("s", "a", 1), ("s", "b", 2))
    known.note("s", "a", 1, 300)
    assert known.tokens_at("s", LIVE) == {"b": 100, "a": 300}
    assert known.tokens_at("s", {"a": 7, "b": 2}) == {"b": 100}
    assert known.tokens_at("other", LIVE) == {}
