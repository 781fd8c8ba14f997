"""``kvell replay --cpu-buffer``: a CPU buffer in virtual time, with measured copy times."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvell.byte_sizes import typed_bytes
from kvell.errors import ChangeSomething
from kvell.memory import Layout, MemoryCore
from kvell.vocabulary import MIB

if TYPE_CHECKING:
    from kvell.engine.cpu_buffer.swapping import Swapping
    from kvell.simulator.replay.runner import StepTimer


@dataclass(frozen=True)
class BufferParts:
    """The parts of a replay with a CPU buffer.

    :param machine: step timer that includes copies.
    :param swapping: returns the buffer of a memory core.
    """

    machine: "StepTimer"
    swapping: Callable[[MemoryCore], "Swapping"]


def make_buffer(
    size_bytes: int, layout: Layout, machine: "StepTimer", weights: int, hardware: str
) -> BufferParts:
    """Return the buffer of an engine on this machine without latency objectives.

    :param weights: number of weights per token, by which copies are compared with recomputation.
    :param hardware: value of ``--hardware``, for errors.
    :raises ChangeSomething: if copies were not measured on the hardware, or the buffer is smaller
        than a large page.
    """
    from kvell.cost.swap_rule import rule_of_weights
    from kvell.elastic.page_buffer import PageBuffer
    from kvell.engine.cpu_buffer.buffered_prefixes import BufferedPrefixes
    from kvell.engine.cpu_buffer.swapping import Swapping
    from kvell.simulator.replay.host_link import calibrated_link
    from kvell.simulator.replay.runner import CalibratedMachine

    if not isinstance(machine, CalibratedMachine):
        problem = f"needs to know what copies take, which --hardware {hardware} does not say"
        raise ChangeSomething(
            "--cpu-buffer", typed_bytes(size_bytes), problem, "use a file of `kvell calibrate`"
        )
    count = size_bytes // layout.large_page_bytes
    if not count:
        problem = f"is less than a large page of the pool: {layout.large_page_bytes} bytes"
        remedy = f"use at least --cpu-buffer {-(-layout.large_page_bytes // MIB)}MiB"
        raise ChangeSomething("--cpu-buffer", typed_bytes(size_bytes), problem, remedy)
    rule = rule_of_weights(weights, machine.calibration.machine.device)

    def swapping(core: MemoryCore) -> Swapping:
        ledger = PageBuffer(layout.groups, count)
        return Swapping(core, ledger, rule, BufferedPrefixes(core, ledger, rule))

    return BufferParts(calibrated_link(machine, layout), swapping)
