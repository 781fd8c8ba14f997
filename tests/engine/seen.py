"""Parts of an engine that tests look at or replace."""

from kvell.cost.swap_rule import SwapRule
from kvell.engine.core.core import EngineCore
from kvell.engine.cpu_buffer.swapping import SavedPages, Swapping
from kvell.engine.engine import Engine
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.setup.objectives import ObjectiveWatch
from kvell.models.images.image_content import ContentIds, Span
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId


def swapping_of(core: EngineCore) -> Swapping:
    swapping = core.scheduler.swapping
    assert swapping is not None
    return swapping


def use_memory(core: EngineCore, memory: StepMemory) -> None:
    core.scheduler.chunks.memory = memory


def use_rule(swapping: Swapping, rule: SwapRule) -> None:
    """Let a rule decide what is swapped, and which prefixes the buffer keeps."""
    swapping.rule = rule
    if swapping.prefixes is not None:
        swapping.prefixes.rule = rule


def use_objectives(engine: Engine, watch: ObjectiveWatch) -> None:
    engine.objectives = watch


def spans_of(store: ImageStore) -> dict[int, Span]:
    return store._spans


def content_ids_of(store: ImageStore) -> ContentIds:
    return store._ids


def saved_of(swapping: Swapping) -> dict[RequestId, SavedPages]:
    return swapping._saved


def copy_out_everything(core: EngineCore) -> None:
    core.scheduler.wanted_large = lambda: 1 << 20  # type: ignore[method-assign]
