from dataclasses import replace

from kvell.engine.core.core import EngineCore
from kvell.engine.requests.limits import Limits, ModelRules
from kvell.memory import (
    Layout,
    create_core,
    plan_layout,
)
from kvell.vocabulary import MIB
from tests.pages.pools import layers

FULL = [replace(layer, model="a") for layer in layers([0, 0])]

MIXED = [replace(layer, model="b") for layer in layers([0, 32, 32])]

EOS = {"a": 3, "b": 4}

WORDS = {"a": 50, "b": 90}


def pool(kv_bytes: int = 1 * MIB) -> Layout:
    return plan_layout([*FULL, *MIXED], kv_bytes)


def core_over(layout: Layout) -> EngineCore:
    limits = Limits(max_num_batched_tokens=64, max_model_len=200, vocab_size=50)
    rules = [
        ModelRules(
            name,
            replace(limits, vocab_size=WORDS[name], max_model_len=length),
            frozenset({EOS[name]}),
            layout.seen_by(name),
        )
        for name, length in (("a", 200), ("b", 100))
    ]
    return EngineCore(create_core(layout), limits, rules[0].eos_token_ids, models=rules)
