"""Storage of each weight of a model: as plain numbers, int8, or int4."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvell.models.fused.grouped import Form, GroupedWeight, join_rows, quantise, widen_grouped
from kvell.models.fused.packing import Rows, rows_of

Weight = torch.Tensor | GroupedWeight


class WeightForms:
    """The form of each linear: the model's own blocks unchanged, else that of the quantization.

    Heads, and embeddings tied to them, are int8 if the others are int4: they are the widest, and
    are read at both ends of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        head: Any,
        quantization: str,
        blocks: Mapping[str, GroupedWeight],
    ) -> None:
        """Take blocks by the names of the module's parameters; quantise others from its dtype."""
        self._dtype: Any = module.dtype
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._head = head
        self._forms = {"none": Form.PLAIN, "int8": Form.INT8, "int4": Form.INT4}[quantization]
        self._blocks = {
            linear: block
            for linear in module.modules()
            if isinstance(linear, nn.Linear)
            and (block := blocks.get(names.get(id(linear.weight), ""))) is not None
            and block.shape == tuple(linear.weight.shape)
        }

    def form(self, linears: Sequence[Any]) -> Form:
        """Return the form of linears whose rows are packed together."""
        brought = {self._blocks[linear].form for linear in linears if linear in self._blocks}
        if len(brought) == 1 and all(linear in self._blocks for linear in linears):
            return brought.pop()
        if self._forms is Form.INT4 and self._head in linears:
            return Form.INT8
        return self._forms

    def weights(self, linears: Sequence[Any]) -> list[Weight]:
        """Return the weights of linears whose rows are packed together, all of one form.

        :raises ValueError: if a number is infinite, or too large for half precision.
        """
        form = self.form(linears)
        return [self._made(linear, form) for linear in linears]

    def weight(self, linear: Any) -> Weight:
        return self.weights((linear,))[0]

    def _made(self, linear: Any, form: Form) -> Weight:
        if form is Form.PLAIN:
            return linear.weight  # type: ignore[no-any-return]
        block = self._blocks.get(linear)
        if block and block.form is form:
            return block
        return quantise(linear.weight.detach().to(self._dtype), form)


def join(
    weights: Sequence[Weight], how: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Rows | GroupedWeight:
    groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if groups:
        return join_rows(groups, how)
    return rows_of([weight for weight in weights if isinstance(weight, torch.Tensor)], how)


def widen(weight: Weight, width: int) -> Rows | GroupedWeight:
    """Add inputs at the end of every row; they may be multiplied by zeros only."""
    if isinstance(weight, GroupedWeight):
        return widen_grouped(weight, width)
    return replace(rows_of([weight]), packed_width=width)
