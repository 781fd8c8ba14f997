"""A pass's progress in writing its pages, reported at layer seams to instances that pull them."""

from collections.abc import Callable, Sequence

import torch

from kvell.models.forward.segments import LayerCallbacks
from kvell.pages.stages import Stage, num_written

TellWritten = Callable[[tuple[int, ...], int], None]
"""A callback: a step's transfers (``StepPlan.streams``), and the last stage that is written."""


class WrittenSeams:
    """Callbacks that report the last written stage to ``tell``, and call other callbacks.

    :param stages: the model's stages in order.
    :param beside: other callbacks of the same pass.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        tell: Callable[[int], None],
        beside: LayerCallbacks | None = None,
    ) -> None:
        self._stages, self._tell, self._beside = stages, tell, beside
        self._told = 0

    def after_kv_write(self, layer: int) -> None:
        """Report the last written stage, if a stage has been completed."""
        if self._beside is not None:
            self._beside.after_kv_write(layer)
        written = num_written(self._stages, layer)
        if written > self._told:
            self._told = written
            self._tell(written - 1)

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        if self._beside is not None:
            self._beside.before_attend(layer, query)

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        if self._beside is not None:
            self._beside.after_attend(layer, output)
