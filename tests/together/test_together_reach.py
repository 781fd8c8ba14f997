"""A request to the second of two models that is longer than its instance's memory."""

from functools import cache
from pathlib import Path

from kvell.engine.engine import Engine
from kvell.engine.protocol.placements import RequestPlacementEntry
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.vocabulary import KIB, RequestId
from tests.models.harness import prompt_ids
from tests.models.serving.lending import Lending
from tests.together.engines import ARCHITECTURE, GREEDY, engine_with

MODELS = ("two models",)
SECOND = "m1"
PROMPT = prompt_ids(1600)
POOL_BYTES = 1000 * KIB


@cache
def expected() -> list[int]:
    with_room = Lending([engine_with(MODELS, ARCHITECTURE, max_model_len=2048)])
    with_room.submit("long", PROMPT, 0, GREEDY, goes_to="", model=SECOND)
    with_room.run()
    return with_room.tokens["long"]


def engine_at(name: str, folder: Path) -> Engine:
    return engine_with(
        MODELS,
        ARCHITECTURE,
        pool_place=FolderRendezvous(name, folder),
        kv_memory_bytes=POOL_BYTES,
        max_model_len=None,
    )


def test_it_comes_with_a_placement_by_its_own_lengths(tmp_path: Path) -> None:
    make_folder(tmp_path)
    engines = [engine_at(name, tmp_path) for name in "ab"]
    lengths = engines[0].ready().facts.beside[SECOND]
    assert lengths.max_model_len < len(PROMPT) < lengths.reach_tokens
    several = Lending(engines)
    parts = (("a", 2, True), ("b", 2, False))
    placement = tuple(
        RequestPlacementEntry(RequestId("long"), at, count, local=local)
        for at, count, local in parts
    )
    several.submit("long", PROMPT, 0, GREEDY, goes_to="", model=SECOND, placement=placement)
    several.run(lambda: several.away("long") == 2)
    several.run()
    assert several.tokens["long"] == expected()
    several.check_pools()
    for engine in engines:
        engine.close()
