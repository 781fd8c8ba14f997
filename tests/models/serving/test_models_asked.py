"""Engines whose creditors compute attention for models without a compiled pass, over TCP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from kvell.engine.assembly import EngineOptions, build_engine
from kvell.engine.engine import Engine
from kvell.engine.protocol.messages import ResetPrefixCache
from kvell.engine.running.lent import queries
from kvell.engine.running.pool_link import SectionAnswers
from kvell.mempool.rendezvous import FolderRendezvous, make_folder
from kvell.models.loading.random_weights import random_module
from kvell.vocabulary import MIB
from tests.models.cases import some_fast
from tests.models.fused_models import generic_model
from tests.models.harness import prompt_ids, tiny_config
from tests.models.serving.lending import PARAMS, Lending, Said, said_by

LONG = prompt_ids(1100)
LONGEST = 1200
MOST = 2
EXPERTS, SINKS, LATENTS = "MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"
STATES, SHARED, CAPS = "Qwen3NextForCausalLM", "Gemma3nForCausalLM", "Gemma2ForCausalLM"


def engine_of(architecture: str, place: FolderRendezvous | None = None) -> Engine:
    options = EngineOptions(
        kv_memory_bytes=8 * MIB,
        max_model_len=LONGEST,
        max_num_batched_tokens=256,
        pool_place=place,
    )
    module = random_module(tiny_config(architecture, max_position_embeddings=2048), 3)
    return build_engine(generic_model(module), architecture, options)


@cache
def alone(architecture: str) -> Said:
    return said_by(engine_of(architecture), {"long": LONG}, PARAMS)["long"]


@contextmanager
def asking(architecture: str, folder: Path) -> Iterator[Lending]:
    """A request, of whose sections the first is at one creditor and the second at another."""
    make_folder(folder)
    places = [FolderRendezvous(name, folder, transport="tcp") for name in "abc"]
    engines = [engine_of(architecture, place) for place in places]
    several = Lending(engines)
    try:
        several.submit("long", LONG, 0, PARAMS, goes_to="")
        several.run(several.answers("long"))
        for section in range(MOST):
            several.move("long", 1, "bc"[section])
            several.run(several.has_away("long", section + 1), 0.02)
        assert "long" not in several.ends
        yield several
    finally:
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(
    "architecture",
    some_fast((EXPERTS, SINKS, LATENTS, STATES, SHARED, CAPS), (EXPERTS, SINKS, LATENTS)),
)
def test_an_answer_is_the_same_bits_while_creditors_compute(
    architecture: str, tmp_path: Path
) -> None:
    with asking(architecture, tmp_path) as several:
        several.run()
        assert several.said["long"] == alone(architecture)
        several.check_pools()


@pytest.mark.parametrize("architecture", some_fast((EXPERTS, STATES), (EXPERTS,)))
def test_late_answers_change_no_token(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step gets its answers too late: it is repeated, or computed anew where it advanced a
    state."""
    in_time, answer = threading.Event(), SectionAnswers.answer
    in_time.set()

    def answer_late(self: SectionAnswers, debtor: str, query: bytes) -> bytes:
        assert in_time.wait(60)
        return answer(self, debtor, query)

    monkeypatch.setattr(SectionAnswers, "answer", answer_late)
    with asking(architecture, tmp_path) as several:
        emitted = list(several.tokens["long"])
        monkeypatch.setattr(queries, "PATIENCE_SECONDS", 0.0)
        in_time.clear()
        several.take(several.engines[0].step())
        assert several.tokens["long"] == emitted, "the step counts nothing"
        in_time.set()
        monkeypatch.undo()
        several.run()
        assert several.tokens["long"] == alone(architecture).tokens
        several.check_pools()


@pytest.mark.parametrize("architecture", some_fast((EXPERTS, STATES), (EXPERTS,)))
def test_a_creditor_that_dies_costs_its_sections(architecture: str, tmp_path: Path) -> None:
    with asking(architecture, tmp_path) as several:
        several.take(several.engines[0].handle(ResetPrefixCache()))  # what was lent is nowhere here
        *several.engines, dead = several.engines
        dead.close()
        several.run()
        assert several.tokens["long"] == alone(architecture).tokens
        several.check_pools()
