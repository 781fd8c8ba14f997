"""Placement of our own mixers inside a transformers model.

A module's ``forward`` is replaced on the instance, so other models of the same class are unchanged.
The step is set for the duration of one forward pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvell.attention.states import StateBatch
from kvell.errors import ChangeSomething
from kvell.models.config.description import ModelDescription
from kvell.models.config.state_sizes import MixerKind
from kvell.models.states.mixers import AS_ATTENTION, MIXERS, Mixer
from kvell.models.states.scan_plan import ScanPlan, plan_scans
from kvell.models.states.state_memory import StateMemory
from kvell.models.states.state_run import StateRun
from kvell.pages.layout import GroupKind


class StatePass:
    """One forward pass: every layer asks for its states once, in order."""

    def __init__(self, memory: StateMemory, batches: Sequence[object]) -> None:
        """Start a pass.

        :param batches: metadata of every group, in the order of the layout.
        """
        self._memory = memory
        self._batches = batches
        self._plans: dict[int, ScanPlan] = {}
        self._left = list(memory.pages)[::-1]

    def states(self, layer: int) -> StateRun:
        """Return the input of the layer's mixer.

        :raises RuntimeError: if it is not the layer's turn, or its group has no state metadata.
        """
        if not self._left or self._left[-1] != layer:
            raise RuntimeError(f"layer {layer} asks for its states, expected {self._left[-1:]}")
        self._left.pop()
        group = self._memory.groups[layer]
        batch = self._batches[group]
        if not isinstance(batch, StateBatch):
            raise RuntimeError(f"the step has no metadata for the states of group {group}")
        if group not in self._plans:
            self._plans[group] = plan_scans(batch)
        return StateRun(self._memory.pages[layer], batch, self._plans[group])

    def require_complete(self) -> None:
        """Raise unless every layer's mixer ran.

        :raises RuntimeError: if a mixer did not run.
        """
        if self._left:
            raise RuntimeError(f"mixers of layers {self._left[::-1]} did not run")


class MixerSlot:
    """Replacement of the forward pass of one transformers module."""

    def __init__(self, mixer: Mixer, layer: int, as_attention: bool = False) -> None:
        """Make a slot without a step.

        :param as_attention: return None for weights as well as the output, as attention does.
        """
        self.mixer = mixer
        self.layer = layer
        self.as_attention = as_attention
        self.step: StatePass | None = None

    def __call__(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Map [1, T, hidden] → the same, with transformers' signature; ignore masks and caches."""
        if self.step is None:
            raise RuntimeError(f"layer {self.layer} has states: it runs in paged steps only")
        output = self.mixer(hidden_states[0], self.step.states(self.layer)).unsqueeze(0)
        return (output, None) if self.as_attention else output


def place_mixers(
    module: Any, description: ModelDescription, kinds: Mapping[str, MixerKind]
) -> tuple[MixerSlot, ...]:
    """Replace the forward pass of every module whose class is in ``kinds``.

    :raises ChangeSomething: if a layer with a state has no such module.
    """
    slots = []
    for child in module.modules():
        kind = kinds.get(type(child).__name__)
        if kind is not None:
            as_attention = kind in AS_ATTENTION
            slot = MixerSlot(MIXERS[kind](child), int(child.layer_idx), as_attention)
            child.forward = slot
            slots.append(slot)
    wanted = {layer.index for layer in description.layers if layer.kind is GroupKind.STATE}
    missing = sorted(wanted ^ {slot.layer for slot in slots})
    if missing:
        raise ChangeSomething(
            "model",
            description.architecture,
            f"has states in layers {missing} without a mixer",
            "use a model whose layers are all known to be exact",
        )
    return tuple(slots)


@contextmanager
def during(slots: Sequence[MixerSlot], step: StatePass) -> Iterator[None]:
    for slot in slots:
        slot.step = step
    try:
        yield
    finally:
        for slot in slots:
            slot.step = None
