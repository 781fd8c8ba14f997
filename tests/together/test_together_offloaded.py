"""Prompts computed into the CPU buffer at instances that move requests and lend: exact tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvell.engine.moving.handovers import Handovers
from kvell.mempool.rendezvous import FolderRendezvous, PageTransport, make_folder
from kvell.vocabulary import MIB
from tests.models.harness import prompt_ids
from tests.models.serving.lending import SECTION_TOKENS, Lending, said_by
from tests.together.mechanisms import GREEDY, engine_with

PROMPTS = {f"q{length}": prompt_ids(length, seed=length) for length in (150, 120, 170, 130, 90)}
LONG_PROMPTS = {f"q{length}": prompt_ids(length, seed=length) for length in (700, 650, 690)}
LONGEST = 800
REAL_TOKENS = 512
"""Tokens of a section over which a creditor can compute attention."""


@cache
def expected(length: int) -> list[int]:
    engine = engine_with((), kv_memory_bytes=64 * MIB, max_model_len=LONGEST)
    prompt = {"one": prompt_ids(length, seed=length)}
    [said] = said_by(engine, prompt, GREEDY).values()
    return said.tokens


class Offloading(Lending):
    """Engines with small pools and large buffers, and the requests that were in a buffer."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.in_buffer: set[str] = set()

    def note(self, at: int = 0) -> None:
        seats = self.engines[at].core.scheduler.seats
        self.in_buffer |= {request.request_id for request in seats.offloaded}

    def resumed(self) -> str:
        """A request of the first engine that was in its buffer and decodes now; "" if none is."""
        self.note()
        running = self.engines[0].core.running
        names = [r.request_id for r in running if r.is_decoding and len(r.output) >= 2]
        return next((name for name in names if name in self.in_buffer), "")

    def has_resumed(self) -> Callable[[], bool]:
        return lambda: bool(self.resumed())

    def check(self) -> None:
        assert self.in_buffer, "no prompt was computed into a buffer"
        for name, tokens in self.tokens.items():
            assert tokens == expected(int(name.removeprefix("q"))), name
        self.check_pools()


@contextmanager
def offloading(
    folder: Path, transport: PageTransport = "memory", kv_mib: int = 0
) -> Iterator[Offloading]:
    make_folder(folder)
    more = {"kv_memory_bytes": kv_mib * MIB, "max_model_len": LONGEST} if kv_mib else {}
    engines = [
        engine_with(
            ("offload",),
            pool_place=FolderRendezvous(name, folder, transport=transport),
            **(more if name == "a" or not kv_mib else more | {"kv_memory_bytes": 64 * MIB}),
        )
        for name in "ab"
    ]
    for engine in engines:
        assert isinstance(engine.core.pool, Handovers)
        tokens = REAL_TOKENS if kv_mib else SECTION_TOKENS
        engine.core.pool.borrowed.section_tokens = tokens
    try:
        yield Offloading(engines)
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_some_are_computed_into_the_buffer_and_some_are_handed_over(
    transport: PageTransport, tmp_path: Path
) -> None:
    """Who leaves is computed in the pool, from where it is sent."""
    with offloading(tmp_path, transport) as several:
        for number, (name, prompt) in enumerate(PROMPTS.items()):
            several.submit(name, prompt, 0, GREEDY, goes_to="b" if number % 2 else "")
        several.run(several.has_resumed())
        several.run()
        assert sorted(several.moved) == sorted(list(PROMPTS)[1::2])
        assert several.in_buffer.isdisjoint(several.moved)
        several.check()


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_a_request_whose_prompt_was_computed_into_the_buffer_migrates(
    transport: PageTransport, tmp_path: Path
) -> None:
    with offloading(tmp_path, transport) as several:
        for name, prompt in PROMPTS.items():
            several.submit(name, prompt, 0, GREEDY, goes_to="")
        several.run(several.has_resumed())
        name = several.resumed()
        several.migrate(name, 0, "b")
        several.run(lambda: bool(several.moved), listens_seconds=0.5)
        several.run()
        assert several.moved == [name]
        several.check()


@pytest.mark.parametrize("by_queries", [False, True])
def test_sections_of_a_request_whose_prompt_was_computed_into_the_buffer_are_lent(
    by_queries: bool, tmp_path: Path
) -> None:
    transport: PageTransport = "tcp" if by_queries else "memory"
    with offloading(tmp_path, transport, 4 if by_queries else 0) as several:
        for name, prompt in (LONG_PROMPTS if by_queries else PROMPTS).items():
            several.submit(name, prompt, 0, GREEDY, goes_to="")
        several.run(several.has_resumed())
        name = several.resumed()
        several.move(name, 1, "b")
        several.run(several.has_away(name, 1), 0.02)
        several.run()
        several.check()
