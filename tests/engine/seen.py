"""Parts of an engine that tests look at or replace."""

from kvell.cost.swap_rule import SwapRule
from kvell.elastic.arena import ActivationNeed
from kvell.elastic.page_buffer import PageBuffer
from kvell.engine.core.core import EngineCore
from kvell.engine.cpu_buffer.swapping import SavedPages, Swapping
from kvell.engine.engine import Engine
from kvell.engine.lending.borrowing_requests import BorrowingRequests
from kvell.engine.lending.distributed_request import DistributedRequest
from kvell.engine.planning.scheduler import Scheduler
from kvell.engine.planning.step_memory import StepMemory
from kvell.engine.requests.request import Request
from kvell.engine.running.engine_link import EngineLink
from kvell.engine.setup.objectives import ObjectiveWatch
from kvell.models.images.image_content import ContentIds, Span
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId


def scheduler_of(core: EngineCore) -> Scheduler:
    """Return the scheduler that plans an engine's steps."""
    return core.scheduler


def swapping_of(core: EngineCore) -> Swapping:
    swapping = scheduler_of(core).swapping
    assert swapping is not None
    return swapping


def use_memory(core: EngineCore, memory: StepMemory) -> None:
    """Let a scheduler ask other step memory."""
    scheduler_of(core).chunks.memory = memory


def use_rule(swapping: Swapping, rule: SwapRule) -> None:
    """Let a rule decide what is swapped, and which prefixes the buffer keeps."""
    swapping.rule = rule
    if swapping.prefixes is not None:
        swapping.prefixes.rule = rule


def use_objectives(engine: Engine, watch: ObjectiveWatch) -> None:
    """Let a watch report what is late."""
    engine.objectives = watch


def activations_of(engine: Engine) -> ActivationNeed:
    """Return what an engine's steps need for activations."""
    return engine.activations


def requests_of(core: EngineCore) -> dict[RequestId, Request]:
    """Return all requests of an engine core by name."""
    return core.requests


def spans_of(store: ImageStore) -> dict[int, Span]:
    return store._spans


def content_ids_of(store: ImageStore) -> ContentIds:
    return store._ids


def link_of(engine: Engine) -> EngineLink:
    """Return an engine's link to its pool."""
    return engine.link


def borrowers_of(borrowing: BorrowingRequests) -> dict[RequestId, DistributedRequest]:
    """Return the requests that have pages on other instances."""
    return borrowing.borrowers


def saved_of(swapping: Swapping) -> dict[RequestId, SavedPages]:
    return swapping._saved


def held_by(buffer: PageBuffer) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return the places of a buffer by holder."""
    return buffer.held


def copy_out_everything(core: EngineCore) -> None:
    """Let every plan copy out whatever is cached."""
    scheduler_of(core).wanted_large = lambda: 1 << 20  # type: ignore[method-assign]
