"""Sections with an image are lent; and ways to move and to lend work on one request."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.moving.handovers import Handovers
from kvell.engine.protocol.messages import ResetPrefixCache
from kvell.memory import Embeddings
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, make_folder
from tests.models.cases import some_fast
from tests.models.harness import prompt_ids
from tests.models.pictures import (
    CROSS,
    EVERY,
    GRIDS,
    PATCHES,
    PIECES,
    PREFIX,
    Prompt,
    pictured,
    text,
)
from tests.models.serving.lending import SECTION_TOKENS, Lending, said_by
from tests.models.serving.picture_pairs import engine_of, submit_of
from tests.together.engines import GREEDY, LONG, LONGEST, engine_with, pool_of

REAL_TOKENS = 512
"""Tokens of a section over which a creditor can compute attention."""


def prompt_of(architecture: str, by_queries: bool, before: int = 20) -> Prompt:
    """More than two sections, with an image after some tokens of text."""
    return pictured(architecture, text(before), 0, text((1100 if by_queries else 120) - before, 1))


def sizes(architecture: str, by_queries: bool) -> dict[str, int]:
    """A prompt that is read in both directions is computed in one step."""
    longest = LONGEST if by_queries else 256
    batched = longest if architecture == PREFIX else 256
    return {"max_model_len": longest, "max_num_batched_tokens": batched}


@cache
def alone(architecture: str, by_queries: bool, before: int = 20) -> list[int]:
    several = Lending([engine_of(architecture, **sizes(architecture, by_queries))])
    [engine] = several.engines
    several.tokens["long"] = []
    prompt = prompt_of(architecture, by_queries, before)
    several.take(engine.handle(submit_of("long", prompt, GREEDY)))
    while engine.has_work():
        several.take(engine.step())
    return several.tokens["long"]


@contextmanager
def lending(
    architecture: str, by_queries: bool, folder: Path, before: int = 20, **more: Any
) -> Iterator[Lending]:
    """Three engines, of which the first answers a prompt with an image."""
    make_folder(folder)
    transport: PageTransport = "tcp" if by_queries else "memory"
    engines = [
        engine_of(
            architecture,
            **sizes(architecture, by_queries),
            pool_place=FolderRendezvous(name, folder, transport=transport),
            **more,
        )
        for name in "abc"
    ]
    several = Lending(engines)
    for engine in engines:
        assert isinstance(engine.core.pool, Handovers)
        engine.core.pool.borrowed.section_tokens = REAL_TOKENS if by_queries else SECTION_TOKENS
    try:
        several.tokens["long"] = []
        prompt = prompt_of(architecture, by_queries, before)
        several.take(engines[0].handle(submit_of("long", prompt, GREEDY, goes_to="")))
        several.run(several.answers("long"))
        yield several
    finally:
        for engine in engines:
            engine.close()


def lend(several: Lending) -> None:
    """Two sections, each to another creditor."""
    for section in range(2):
        several.move("long", 1, "bc"[section])
        several.run(several.has_filled("long", section + 1), 0.02)
        several.run(several.has_away("long", section + 1), 0.05)
    borrower = several.borrower("long")
    assert borrower is not None and not several.ends


@pytest.mark.parametrize("architecture", some_fast((PATCHES, PIECES, GRIDS), (PATCHES,)))
def test_sections_with_an_image_are_read_at_creditors(architecture: str, tmp_path: Path) -> None:
    with lending(architecture, False, tmp_path) as several:
        lend(several)
        several.run()
        assert several.tokens["long"] == alone(architecture, False)
        several.check_pools()


@pytest.mark.parametrize("architecture", some_fast(EVERY, (PATCHES, CROSS, PREFIX)))
def test_creditors_compute_attention_over_sections_with_an_image(
    architecture: str, tmp_path: Path
) -> None:
    """Queries find keys and values of images; images beside the text stay at the debtor."""
    with lending(architecture, True, tmp_path) as several:
        lend(several)
        borrower = several.borrower("long")
        assert borrower is not None and borrower.by_queries
        several.run()
        assert several.tokens["long"] == alone(architecture, True)
        several.check_pools()


@pytest.mark.parametrize("embeddings", ["in-kv", pytest.param("own", marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", some_fast((PATCHES, PIECES, GRIDS), (PATCHES,)))
def test_an_image_across_a_section_that_is_lost_is_computed_again(
    architecture: str, embeddings: Embeddings, tmp_path: Path
) -> None:
    """The section before keeps the image's beginning, and its embeddings are gone."""
    before = REAL_TOKENS - 3
    with lending(architecture, True, tmp_path, before, embeddings=embeddings) as several:
        lend(several)
        several.take(several.engines[0].handle(ResetPrefixCache()))  # what was lent is nowhere here
        *several.engines, dead = several.engines
        dead.close()
        several.run()
        assert several.tokens["long"] == alone(architecture, True, before)
        several.check_pools()


LONGER = prompt_ids(1100)


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
