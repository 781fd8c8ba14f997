"""The rule of eviction is a setting of every engine, as it is one of a replay."""

import pytest

from kvell.engine import assembly
from kvell.engine.engine import Engine
from kvell.engine.setup.engine_settings import EngineSettings
from kvell.engine.setup.options import EngineOptions
from kvell.errors import ChangeSomething
from kvell.memory import EVICTIONS, Eviction, VisibleCore, create_core
from kvell.pages.layout import Layout
from kvell.vocabulary import MIB
from tests.models.harness import paged, tiny_module


def engine_of(rule: Eviction) -> Engine:
    model = paged(tiny_module("LlamaForCausalLM"))
    options = EngineOptions(kv_memory_bytes=8 * MIB, max_model_len=256, eviction=rule)
    return assembly.build_engine(model, "tiny", options)


@pytest.mark.parametrize("rule", EVICTIONS)
def test_an_engines_pool_has_the_rule_of_its_options(
    rule: Eviction, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Eviction] = []

    def create(layout: Layout, eviction: Eviction) -> VisibleCore:
        made.append(eviction)
        return create_core(layout, eviction)

    monkeypatch.setattr(assembly, "create_core", create)
    engine_of(rule).close()
    assert made == [rule]
    flags = EngineSettings(model="tiny", eviction=rule).flags()
    assert flags[flags.index("--eviction") + 1] == rule


def test_a_rule_that_does_not_exist_is_named() -> None:
    with pytest.raises(ChangeSomething, match=r"eviction=random.*use lru or hazard"):
        engine_of("random")  # type: ignore[arg-type]
