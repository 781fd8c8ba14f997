"""What instances and people call a request."""

from hypothesis import given
from hypothesis import strategies as st

from kvell.engine.protocol.pages import LargePage, Miss, PageOwner, Pages
from kvell.front.front import RequestNames
from kvell.vocabulary import RequestId

NAMES = RequestNames("front-3f9a12cc")


@given(st.text(max_size=20))
def test_every_name_comes_back_whatever_a_client_chose(name: str) -> None:
    for names in (NAMES, RequestNames()):
        assert names.shorten(names.known(name)) == name
    assert NAMES.known(name).partition(":") == ("front-3f9a12cc", ":", name)
    assert RequestNames().known(name) == name


@given(st.text(max_size=20))
def test_a_name_that_looks_like_a_known_one_keeps_what_is_its_own(name: str) -> None:
    tricky = f"front-3f9a12cc:{name}"
    assert NAMES.shorten(NAMES.known(tricky)) == tricky
    assert RequestNames().shorten(RequestId(tricky)) == tricky


def test_those_of_other_fronts_stay_whole() -> None:
    assert NAMES.shorten(RequestId("front-00000000:a")) == "front-00000000:a"


def owner(name: str) -> PageOwner:
    return PageOwner(RequestId(name), 1, 0, 16)


def test_pages_are_shown_with_names_for_people() -> None:
    told = LargePage(1, 7, owners=(owner("front-3f9a12cc:a"), owner("front-1:b")))
    assert [one.request_id for one in NAMES.large_page(told).owners] == ["a", "front-1:b"]
    assert RequestNames().large_page(told) is told


def test_misses_are_shown_with_names_for_people() -> None:
    miss = Miss(RequestId("front-3f9a12cc:a"), 3, 20, 0, 0, 0, "never_seen", ())
    told = Pages(5, 9, misses=(miss,))
    assert [one.request_id for one in NAMES.pages(told).misses] == ["a"]
    assert RequestNames().pages(told) is told
    bare = Pages(5, 9)
    assert NAMES.pages(bare) is bare
