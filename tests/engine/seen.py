"""Parts of an engine that tests look at or replace."""

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.arena import ActivationNeed
from kvell.engine.core.core import EngineCore
from kvell.engine.cpu_buffer.swapping import Swapping
from kvell.engine.engine import Engine
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.setup.objectives import ObjectiveWatch


def scheduler_of(core: EngineCore) -> Scheduler:
    """Return the scheduler that plans an engine's steps."""
    return core._scheduler


def swapping_of(core: EngineCore) -> Swapping:
    """Return the CPU buffer's side of a scheduler that has one."""
    swapping = scheduler_of(core).swapping
    assert swapping is not None
    return swapping


def use_memory(core: EngineCore, memory: StepMemory) -> None:
    """Let a scheduler ask other step memory."""
    scheduler_of(core)._chunks.memory = memory


def use_rule(swapping: Swapping, rule: SwapRule) -> None:
    """Let a rule decide what is swapped, and which prefixes the buffer keeps."""
    swapping._rule = rule
    if swapping.prefixes is not None:
        swapping.prefixes._rule = rule


def use_objectives(engine: Engine, watch: ObjectiveWatch) -> None:
    """Let a watch report what is late."""
    engine._objectives = watch


def activations_of(engine: Engine) -> ActivationNeed:
    """Return what an engine's steps need for activations."""
    return engine._activations
