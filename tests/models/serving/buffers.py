import random
from collections.abc import Sequence

import numpy as np

from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.protocol.messages import Tokens
from kvell.memory import MemoryCore, audit
from kvell.vocabulary import MIB
from tests.engine.seen import copy_out_everything, use_memory, use_rule
from tests.engine.swapping import Always
from tests.models.served import Served

PROMPTS = [[(7 * n + i * i) % 199 + 3 for i in range(20 + 31 * n)] for n in range(4)]


class Forcing(StepMemory):
    """Refuses decodes their memory when a seed says so: the youngest is preempted."""

    def __init__(self, core: MemoryCore, seed: int) -> None:
        super().__init__(core)
        self._draw = random.Random(seed)

    def before_decodes(self, lengths: Sequence[int]) -> bool:
        return self._draw.random() > 0.3


def force(engine: Engine, seed: int) -> Swapping:
    """The engine preempts at random, and swaps whom it can."""
    scheduler = engine.core.scheduler
    use_memory(engine.core, Forcing(engine.core.memory, seed))
    swapping = scheduler.swapping
    assert swapping is not None
    use_rule(swapping, Always())
    return swapping


def outputs(run: Served) -> dict[str, list[int]]:
    """Tokens of every request, however many a step brings; the memory is audited."""
    engine, tokens = run.engine, dict[str, list[int]]()
    for number, prompt in enumerate(PROMPTS):
        run.submit(str(number), prompt, 14)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        assert audit(run.layout, engine.core.memory.snapshot()) == []
    return tokens


TEXT = [(i * i + 11 * i) % 199 + 3 for i in range(90)]


def caching(architecture: str) -> tuple[Served, Swapping]:
    """Every plan copies out whatever is cached."""
    run = Served(architecture, batched=64, cpu_buffer_bytes=8 * MIB)
    scheduler = run.engine.core.scheduler
    copy_out_everything(run.engine.core)
    swapping = scheduler.swapping
    assert swapping is not None
    assert swapping.prefixes is not None
    use_rule(swapping, Always())
    return run, swapping


def evict(run: Served) -> None:
    core = run.engine.core.memory
    handle = core.open(np.asarray([1, 2], np.int32), "nobody's", reuse=False)
    core.close(handle, renew=False)
    assert not any(core.totals().cached_pages)


def ask_again(run: Served, first: Sequence[int]) -> int:
    """A next turn after everything was evicted; tokens that it did not compute."""
    answer = run.ask("first", first, 8)
    run.ask("between", [5, 6, 7], 2)  # its plan copies out what the first has left
    evict(run)
    turn = [*first, *answer.output, 9, 8, 7]
    return run.ask("next turn", turn, 8).cached_tokens
