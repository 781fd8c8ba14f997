"""The input of a model's head: the final norm's output of the rows whose logits are requested."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HeadInput:
    """Recorder of the input of a transformers model's head, for steps that request it.

    The final norm is not always the module before the head, and some models scale its output; the
    head's input has one meaning in all models, and only the requested rows.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._rows: torch.Tensor | None = None

    @contextmanager
    def recording(self, wanted: bool) -> Iterator[None]:
        """Record the input while the body of the ``with`` runs the module, if ``wanted``."""
        if not wanted:
            yield
            return
        self._rows = None
        handle = self._module.get_output_embeddings().register_forward_pre_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()

    def rows(self) -> torch.Tensor:
        """Return the rows recorded last, float32 [rows, hidden].

        :raises RuntimeError: if the head was not called.
        """
        if self._rows is None:
            raise RuntimeError("the model's head did not run, so nothing was kept of its input")
        return self._rows.reshape(-1, self._rows.shape[-1]).float()

    def _keep(self, _head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._rows = inputs[0]
