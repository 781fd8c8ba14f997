"""Ways to move and to lend together, on one request after the other: the answers stay the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvell.mempool.rendezvous import PageTransport
from tests.models.harness import prompt_ids
from tests.models.serving.lending import SECTION_TOKENS, Lending, said_by
from tests.together.engines import GREEDY, LONG, LONGEST, engine_with, pool_of

LONGER = prompt_ids(1100)
REAL_TOKENS = 512
"""Tokens of a section over which a creditor can compute attention."""


@cache
def expected(length: int) -> list[int]:
    engine = engine_with((), max_model_len=LONGEST)
    [said] = said_by(engine, {"long": prompt_ids(length)}, GREEDY).values()
    return said.tokens


@contextmanager
def three(folder: Path, transport: PageTransport) -> Iterator[tuple[Lending, list[int]]]:
    by_queries = transport == "tcp"
    tokens = REAL_TOKENS if by_queries else SECTION_TOKENS
    with pool_of((), folder, "abc", transport, section_tokens=tokens) as several:
        yield several, LONGER if by_queries else LONG


def is_away(several: Lending, at: int) -> Callable[[], bool]:
    return lambda: several.away("long", at) == 1


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_request_that_was_handed_over_migrates_on(
    transport: PageTransport, tmp_path: Path
) -> None:
    with pool_of((), tmp_path, "abc", transport) as several:
        several.submit("long", LONG, 0, GREEDY, goes_to="b")
        several.run(lambda: several.moved == ["long"] and len(several.tokens["long"]) >= 3)
        several.migrate("long", 1, "c")
        several.run(lambda: len(several.moved) == 2, listens_seconds=1.0)
        several.run()
        assert several.tokens["long"] == expected(len(LONG))
        several.check_pools()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_sections_of_a_request_that_was_handed_over_are_lent(
    transport: PageTransport, tmp_path: Path
) -> None:
    """In place, and by queries over TCP."""
    with three(tmp_path, transport) as (several, prompt):
        several.submit("long", prompt, 0, GREEDY, goes_to="b")
        several.run(lambda: several.moved == ["long"] and len(several.tokens["long"]) >= 3)
        several.move("long", 1, "c", at=1)
        several.run(is_away(several, 1), 0.02)
        several.run()
        assert several.tokens["long"] == expected(len(prompt))
        several.check_pools()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_sections_of_a_request_that_migrated_are_lent_and_then_it_stays(
    transport: PageTransport, tmp_path: Path
) -> None:
    with three(tmp_path, transport) as (several, prompt):
        several.submit("long", prompt, 0, GREEDY, goes_to="")
        several.run(lambda: len(several.tokens["long"]) >= 3)
        several.migrate("long", 0, "b")
        several.run(lambda: several.moved == ["long"], listens_seconds=1.0)
        several.move("long", 1, "c", at=1)
        several.run(is_away(several, 1), 0.02)
        several.migrate("long", 1, "a")
        several.run()
        assert several.moved == ["long"], "a request with sections elsewhere stays"
        assert several.tokens["long"] == expected(len(prompt))
        several.check_pools()
