"""The state groups of one model: where its layers' states lie, and one pass over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvell.attention.states import StateBatch
from kvell.models.mixer_slots import MixerSlot
from kvell.models.scan_plan import ScanPlan, plan_scans
from kvell.models.state_pages import StatePages, state_pages
from kvell.models.state_run import StateRun
from kvell.pages.layout import GroupKind, Layout


@dataclass(frozen=True)
class StateMemory:
    """Per layer with a state, in order: its pages and the index of its group."""

    pages: dict[int, StatePages]
    groups: dict[int, int]


def state_memory(
    layout: Layout, slots: Sequence[MixerSlot], pool: torch.Tensor, dtype: torch.dtype
) -> StateMemory:
    """Where every mixer finds its states.

    :param dtype: of the model.
    :raises ValueError: if a layer has no group, or a mixer's states are of another size.
    """
    groups = {slot.layer: layout.group_of_layer(slot.layer, GroupKind.STATE) for slot in slots}
    pages = {
        slot.layer: state_pages(
            layout.groups[groups[slot.layer]], slot.layer, slot.mixer.shapes, pool, dtype
        )
        for slot in slots
    }
    return StateMemory(pages, groups)


class StatePass:
    """One forward pass: every layer asks for its states once, in order."""

    def __init__(self, memory: StateMemory, batches: Sequence[object]) -> None:
        """:param batches: metadata of every group, in the order of the layout."""
        self._memory = memory
        self._batches = batches
        self._plans: dict[int, ScanPlan] = {}
        self._left = list(memory.pages)[::-1]

    def states(self, layer: int) -> StateRun:
        """What the layer's mixer computes with (``mixer_slots.StateStep``)."""
        if not self._left or self._left[-1] != layer:
            raise RuntimeError(f"layer {layer} asks for its states, expected {self._left[-1:]}")
        self._left.pop()
        group = self._memory.groups[layer]
        batch = self._batches[group]
        if not isinstance(batch, StateBatch):
            raise RuntimeError(f"group {group} has states, the step has none for it")
        if group not in self._plans:
            self._plans[group] = plan_scans(batch)
        return StateRun(self._memory.pages[layer], batch, self._plans[group])

    def require_complete(self) -> None:
        """Every layer's mixer ran."""
        if self._left:
            raise RuntimeError(f"mixers of layers {self._left[::-1]} did not run")
