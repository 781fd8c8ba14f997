"""Sections that move and are recalled at random, while others' live data take their pages."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.moving.handovers import Handovers
from kvell.memory import pool_bytes_for
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.vocabulary import MIB
from tests.models.cases import covering
from tests.models.fused_models import bf16_module, fused_model, generic_model
from tests.models.harness import prompt_ids, tiny_module
from tests.models.serving.lending import PARAMS, Lending, said_by, small_sections

SEEDS = range(4)
LONG = prompt_ids(130)
CASES = [
    ("LlamaForCausalLM", True, False),
    ("LlamaForCausalLM", True, True),
    ("Gemma3ForCausalLM", True, True),
    ("FalconH1ForCausalLM", True, False),
    ("MiniCPM3ForCausalLM", False, False),
]
"""Architecture, whether the compiled pass runs, and whether numbers are bfloat16."""
MARKED = [pytest.param(case, id=f"{case[0]}-{'bf16' if case[2] else 'float32'}") for case in CASES]
ENOUGH_MILLISECONDS = 60_000
"""For a section to come home: nobody waits for as long."""


def engine(architecture: str, is_fused: bool, is_half: bool, **more: Any) -> Engine:
    module = (bf16_module if is_half else tiny_module)(architecture)
    model = (fused_model if is_fused else generic_model)(module)
    options = EngineOptions(max_model_len=256, max_num_batched_tokens=64, **more)
    return build_engine(model, architecture, options)


@cache
def small_bytes(case: tuple[str, bool, bool]) -> int:
    """A pool for little more than one request: what was lent is soon somebody else's page."""
    one = engine(*case, kv_memory_bytes=8 * MIB)
    return pool_bytes_for(one.core.memory.layout, 256, 64) * 5 // 4


@contextmanager
def lending(case: tuple[str, bool, bool], folder: Path) -> Iterator["Recalling"]:
    folder.mkdir()
    make_folder(folder)
    kv_bytes = small_bytes(case)
    engines = [
        engine(*case, kv_memory_bytes=kv_bytes, pool_place=FolderRendezvous(name, folder))
        for name in "abc"
    ]
    with small_sections(engines):
        yield Recalling(engines)


class Recalling(Lending):
    """Creditors that want back what they lent at any moment."""

    def recall(self, at: int, ticks: int) -> None:
        """Want the youngest loan back; with no time left its pages are others' at once."""
        core = self.engines[at].core
        handovers = core.pool
        assert isinstance(handovers, Handovers)
        agent = handovers.agent
        one = [1] * len(core.memory.layout.groups)
        handovers.sort_actions(agent.lending.recall(one, agent.now, ticks))
        self.engines[at].loop.act()

    def lend_one(self, at: int) -> None:
        """Let the first section go to another engine; it is read there from now on."""
        self.move("long", 1, "abc"[at])
        self.hear(self.has_filled("long", 1))
        self.take(self.engines[0].step())
        assert self.away("long") == 1

    def come_home(self, at: int) -> None:
        """Lend a section that is wanted back, with time enough."""
        self.lend_one(at)
        self.recall(at, ENOUGH_MILLISECONDS)
        self.hear(lambda: (one := self.borrower("long")) is not None and one.recalled == 0)
        self.take(self.engines[0].step())
        assert self.tally()["returned"] == 1

    def lose(self, at: int) -> None:
        """Lend a section whose pages are others' before it is said."""
        self.lend_one(at)
        self.recall(at, 0)
        self.hear(lambda: self.tally()["lost"] == 1)

    def tally(self) -> dict[str, int]:
        """What became of sections that the first engine borrowed."""
        handovers = self.engines[0].core.pool
        assert isinstance(handovers, Handovers)
        return handovers.borrowed.tally()


def texts(seed: int) -> dict[str, list[int]]:
    chance = random.Random(seed)
    return {f"s{n}": prompt_ids(chance.randint(3, 90), seed=100 * seed + n) for n in range(8)}


def turns(count: int) -> Callable[[], bool]:
    left = iter([False] * count)
    return lambda: next(left, True)


def run_at_random(several: Recalling, seed: int) -> None:
    """Let a section come home and another be lost, and then everything happen in some order until
    the long request has ended."""
    chance, short = random.Random(seed), list(texts(seed).items())
    several.submit("long", LONG, 0, PARAMS, goes_to="")
    several.run(several.answers("long"))
    several.come_home(1)
    several.lose(2)
    while "long" not in several.ends:
        kind = chance.random()
        if kind < 0.3:
            several.move("long", chance.randint(1, 3), chance.choice("bc"))
        elif kind < 0.4 and several.away("long"):
            several.recall(chance.choice((1, 2)), chance.choice((0, 0, 5_000)))
        elif kind < 0.5 and short:
            name, prompt = short.pop()
            several.submit(name, prompt, chance.choice((1, 2)), PARAMS, goes_to="")
        several.run(turns(chance.randint(1, 3)), chance.choice((0.0, 0.01)))
    for name, prompt in short:
        several.submit(name, prompt, chance.choice((1, 2)), PARAMS, goes_to="")
    several.run()


@covering({"case": MARKED, "seed": SEEDS}, together=1)
def test_no_recall_changes_an_answer(
    case: tuple[str, bool, bool], seed: int, tmp_path: Path
) -> None:
    """Pages that were lent hold the texts of other requests soon after; nobody reads those."""
    prompts = {"long": LONG, **texts(seed)}
    expected = said_by(engine(*case, kv_memory_bytes=8 * MIB), prompts)
    with lending(case, tmp_path / "instances") as several:
        run_at_random(several, seed)
        told = several.tally()
        several.check_pools()
    assert told["returned"] and told["lost"], told
    assert {name: one.tokens for name, one in several.said.items()} == {
        name: one.tokens for name, one in expected.items()
    }
    _, is_fused, _ = case
    if is_fused:  # torch's modules round by what shares a step
        assert several.said == expected
