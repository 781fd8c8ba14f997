"""Sections of a prompt with an image are lent, also those that hold the image's tokens."""

from pathlib import Path

import pytest

from kvell.engine.moving.handovers import Handovers
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from tests.models.pictures import GRIDS, PATCHES, PIECES, pictured, text
from tests.models.serving.test_models_images_handed_over import engine_of, submit_of
from tests.models.serving.test_models_lent import SECTION_TOKENS, Lending
from tests.together.engines import GREEDY


@pytest.mark.parametrize(
    "architecture",
    [PATCHES, *(pytest.param(name, marks=pytest.mark.long) for name in (PIECES, GRIDS))],
)
def test_sections_with_an_image_are_read_at_creditors(architecture: str, tmp_path: Path) -> None:
    prompt = pictured(architecture, text(20), 0, text(100, 1))
    alone = Lending([engine_of(architecture)])
    alone.tokens["long"] = []
    alone.take(alone.engines[0].handle(submit_of("long", prompt, GREEDY)))
    while alone.engines[0].has_work():
        alone.take(alone.engines[0].step())
    make_folder(tmp_path)
    several = Lending(
        [engine_of(architecture, pool_place=FolderRendezvous(name, tmp_path)) for name in "abc"]
    )
    for engine in several.engines:
        assert isinstance(engine.core.pool, Handovers)
        engine.core.pool.borrowed.sections.section_tokens = SECTION_TOKENS
    try:
        several.tokens["long"] = []
        several.take(several.engines[0].handle(submit_of("long", prompt, GREEDY, goes_to="")))
        several.run(several.answers("long"))
        for section in range(2):
            several.move("long", 1, "bc"[section])
            several.run(several.has_filled("long", section + 1), 0.02)
            several.run(several.has_away("long", section + 1), 0.05)
        several.run()
        assert several.tokens["long"] == alone.tokens["long"]
        several.check_pools()
    finally:
        for engine in several.engines:
            engine.close()
