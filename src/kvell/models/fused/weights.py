"""A recipe's weights, packed one after another in order of use."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from kvell.device.weight_memory import WeightMemory
from kvell.models.fused.grouped import (
    BlockWeight,
    Form,
    GroupedWeight,
    join_rows,
    quantise,
    widen_grouped,
)
from kvell.models.fused.packing import (
    PackedMatrix,
    Rows,
    Shape,
    WeightStore,
    interleave_gates,
    rows_of,
    store_bytes,
)
from kvell.models.fused.parts import Joined, ScaledLinear, joined_bias, joined_factors
from kvell.models.fused.recipe import DecoderRecipe, LayerRecipe

Weight = torch.Tensor | GroupedWeight


class WeightForms:
    """The form of each linear: that of the model's own blocks, else that of the quantization.

    Linears whose rows are packed together have one form: int8 if their blocks differ, and the
    plain one if a linear among them has no blocks and is not quantised.

    Heads, and embeddings tied to them, are int8 if the others are int4: they are the widest, and
    are read at both ends of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        head: Any,
        quantization: str,
        blocks: Mapping[str, BlockWeight],
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
        if all(linear in self._blocks for linear in linears):
            brought = {self._blocks[linear].form for linear in linears}
            return brought.pop() if len(brought) == 1 else Form.INT8
        if self._forms is Form.INT4 and self._head in linears:
            return Form.INT8
        return self._forms

    def weights(self, linears: Sequence[Any]) -> list[Weight]:
        """Return the weights of linears whose rows are packed together, all of one form.

        :raises ValueError: if a number is infinite, or too large for half precision.
        """
        form = self.form(linears)
        made = [self._made(linear, form) for linear in linears]
        if form is Form.PLAIN and any(linear in self._blocks for linear in linears):
            return [part.float() for part in made if isinstance(part, torch.Tensor)]
        return made

    def weight(self, linear: Any) -> Weight:
        return self.weights((linear,))[0]

    def _made(self, linear: Any, form: Form) -> Weight:
        block = self._blocks.get(linear)
        if block is not None:
            return block.unpack(self._dtype) if form is Form.PLAIN else block.to_form(form)
        if form is Form.PLAIN:
            return linear.weight  # type: ignore[no-any-return]
        return quantise(linear.weight.detach().to(self._dtype), form)


def join(
    weights: Sequence[Weight], how: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Rows | GroupedWeight:
    groups = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    if groups:
        return join_rows(groups, how)
    return rows_of([weight for weight in weights if isinstance(weight, torch.Tensor)], how)


def widen(weight: Weight, width: int) -> Rows | GroupedWeight:
    if isinstance(weight, GroupedWeight):
        return widen_grouped(weight, width)
    return replace(rows_of([weight]), packed_width=width)


@dataclass(frozen=True)
class LayerMatrices:
    """One layer's packed matrices.

    :ivar inputs: queries, keys, values and a mixer's inputs, which read the layer's first norm.
    :ivar mixed: the mixer's output projection; None without a mixer.
    """

    inputs: PackedMatrix
    mixed: PackedMatrix | None
    out: PackedMatrix
    gates: PackedMatrix
    down: PackedMatrix


class PackedWeights:
    """All weights of a recipe; the modules' own are freed as they are packed.

    If another process packed them already, they are neither read nor packed.
    """

    def __init__(
        self, recipe: DecoderRecipe, forms: WeightForms, num_threads: int, memory: WeightMemory
    ) -> None:
        self._dtype, self._threads = recipe.dtype, num_threads
        self._forms = forms
        shapes = list(_shapes(recipe, forms))
        self._shapes = iter(shapes)
        self._store = WeightStore(store_bytes(shapes, self._dtype), memory, _named(shapes))
        self.layers = [self._layer(layer) for layer in recipe.layers]
        self.head = self._alone(recipe.head)

    @property
    def used_bytes(self) -> int:
        return self._store.used_bytes

    def _layer(self, layer: LayerRecipe) -> LayerMatrices:
        return LayerMatrices(
            inputs=self._together(layer.inputs, torch.cat),
            mixed=None if layer.mixer is None else self._alone(layer.mixer.out_proj),
            out=self._alone(layer.out_proj),
            gates=self._together(layer.gates, lambda both: interleave_gates(*both)),
            down=self._alone(layer.down_proj, layer.packed_inner),
        )

    def _together(self, parts: Sequence[ScaledLinear], how: Joined) -> PackedMatrix:
        linears = [part.linear for part in parts]
        made = self._add(
            lambda: join(self._forms.weights(linears), how),
            joined_bias(parts, how),
            joined_factors(parts, how),
        )
        for linear in linears:
            _free(linear)
        return made

    def _alone(self, linear: Any, width: int | None = None) -> PackedMatrix:
        made = self._add(
            lambda: widen(self._forms.weight(linear), width or linear.in_features), linear.bias
        )
        _free(linear)
        return made

    def _add(
        self,
        made: Callable[[], Rows | GroupedWeight],
        bias: torch.Tensor | None,
        factors: torch.Tensor | None = None,
    ) -> PackedMatrix:
        shape = next(self._shapes)
        if self._store.is_filled:
            return self._store.find(shape, bias, self._dtype, factors)
        return self._store.add(made(), bias, self._dtype, factors, self._threads)


def in_memory(
    memory: WeightMemory, values: torch.Tensor, dtype: torch.dtype, name: str
) -> torch.Tensor:
    size_bytes = values.numel() * dtype.itemsize
    piece = memory.take(f"{name} {tuple(values.shape)} {dtype}", size_bytes)
    view = torch.frombuffer(piece.memory, dtype=torch.uint8)[:size_bytes].view(dtype)
    view = view.view(values.shape)
    if not piece.is_filled:
        view.copy_(values)
    return view


def _named(shapes: Sequence[Shape]) -> str:
    text = repr([(out, width, int(form)) for out, width, form in shapes])
    return f"packed {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _shapes(recipe: DecoderRecipe, forms: WeightForms) -> Iterator[Shape]:
    for layer in recipe.layers:
        inner = layer.packed_inner
        inputs = [part.linear for part in layer.inputs]
        gates = [part.linear for part in layer.gates]
        width = inputs[0].in_features
        yield sum(linear.out_features for linear in inputs), width, forms.form(inputs)
        if layer.mixer is not None:
            yield _shape(layer.mixer.out_proj, forms)
        yield _shape(layer.out_proj, forms)
        yield 2 * inner, width, forms.form(gates)
        yield layer.down_proj.out_features, inner, forms.form((layer.down_proj,))
    yield _shape(recipe.head, forms)


def _shape(linear: Any, forms: WeightForms) -> Shape:
    return linear.out_features, linear.in_features, forms.form((linear,))


def _free(linear: Any) -> None:
    linear.weight.data = linear.weight.new_empty(0)
