"""Sections of a prompt with an image are lent, also those that hold the image's tokens."""

from collections.abc import Iterator
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
from tests.models.serving.lending import SECTION_TOKENS, Lending
from tests.models.serving.picture_pairs import engine_of, submit_of
from tests.together.engines import GREEDY, LONGEST

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
