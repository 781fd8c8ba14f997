"""One forward pass over the states of a model's layers."""

from collections.abc import Sequence

from kvell.attention.states import StateBatch
from kvell.models.states.scan_plan import ScanPlan, plan_scans
from kvell.models.states.state_memory import StateMemory
from kvell.models.states.state_run import StateRun


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
        """Return the input of the layer's mixer (``mixer_slots.StateStep``).

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
