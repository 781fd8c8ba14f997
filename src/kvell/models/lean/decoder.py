"""A dense decoder's compiled pass: built once from a recipe, then one call for each step."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvell.attention.interface import AttentionKernels, GroupBatch, LayerPages
from kvell.elastic.arena import StepBuffers
from kvell.models.description import ModelDescription
from kvell.models.lean.forms import Weight, WeightForms, join, widen
from kvell.models.lean.grouped import GroupedWeight
from kvell.models.lean.need import DecoderShape, StepParts, aligned
from kvell.models.lean.packing import (
    PANEL,
    PackedMatrix,
    Shape,
    WeightStore,
    gated,
    store_bytes,
)
from kvell.models.lean.recipe import DecoderRecipe, LayerRecipe, NormRecipe, recipe_of, weights_of
from kvell.models.segments import LayerCallbacks

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels
    from kvell.models import _forward

_DTYPES = (torch.float32, torch.bfloat16)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_NO_NORM = (0, 0.0)


class LeanDecoder:
    """All layers of a step in one call of compiled code.

    A token's logits depend on its own context alone, to the last bit: neither the batch, nor
    prefill chunks, nor where pages lie, nor threads change them.

    Not for concurrent use.
    """

    def __init__(
        self,
        recipe: DecoderRecipe,
        kernels: "NativeKernels",
        forms: WeightForms,
        longest_tokens: int,
    ) -> None:
        """Pack the recipe's weights; the modules' own are given up, tied ones once.

        :param forms: what each weight is kept as.
        :param longest_tokens: context that attention may be cut for among threads.
        """
        self._threads = kernels.num_threads or torch.get_num_threads()
        self._dtype: torch.dtype = recipe.head.weight.dtype
        self._vocab_size: int = recipe.head.weight.shape[0]
        self._heads, self._head_size = recipe.heads, recipe.head_size
        self._kept: list[Any] = []
        self._forms = forms
        self._store = WeightStore(_store_bytes(recipe, forms))
        self._forward = self._build(recipe, kernels.instruction_set)
        self._attention_bytes = aligned(
            self._forward.attention_bytes(self._threads, longest_tokens)
        )
        self._shape = _shape(recipe)
        self._lent: torch.Tensor | None = None
        self._own = torch.empty(0, dtype=torch.uint8)
        self.used_bytes = 0

    @property
    def weight_bytes(self) -> int:
        """Of packed weights; embeddings of their own are the module's."""
        return self._store.used_bytes

    @property
    def buffers(self) -> StepBuffers:
        """What a step takes beside weights and pages: all its buffers, and its logits."""
        return self._shape.buffers(self._attention_bytes)

    def use_memory(self, lent: torch.Tensor | None) -> None:
        """Compute in this memory, uint8 [any number], from now on; None: in memory of its own.

        What a step returns lies in it too, until the next one.  Several models may have the same,
        if they take turns.
        """
        self._lent = lent

    def attach(self, pages: Mapping[int, LayerPages], groups: Mapping[int, int]) -> None:
        """Say where each layer's keys and values lie, and which group's metadata is its own."""
        from kvell.attention.native import layer_args

        self._kept_pages = list(pages.values())
        order = sorted(pages)
        self._forward.attach(
            [layer_args(pages[index]) for index in order], [groups[index] for index in order]
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_rows: torch.Tensor,
        groups: Sequence[GroupBatch],
        callbacks: LayerCallbacks | None = None,
    ) -> torch.Tensor:
        """Compute a step; parameters as in ``ForwardBatch``; logits, float32 [rows, vocab].

        :raises ValueError: if an id, row or page does not exist, metadata disagree, or the step
            needs more memory than it was lent.
        """
        from kvell.attention.native import batch_args

        tokens, rows = token_ids.numel(), logits_rows.numel()
        parts = self._parts(tokens, rows)
        memory = self._memory(parts)
        logits = self._logits(memory, parts, rows)
        ids, places, wanted = (_int64(x) for x in (token_ids, positions, logits_rows))
        at = memory.data_ptr()
        used_bytes = self._forward.run(
            (tokens, ids.data_ptr(), places.data_ptr()),
            (rows, wanted.data_ptr()),
            [
                (batch_args(g, tokens), g.write_page_ids.data_ptr(), g.write_offsets.data_ptr())
                for g in groups
            ],
            (at + parts.attention_bytes, parts.rows_bytes),
            (at, parts.attention_bytes),
            logits.data_ptr(),
            self._threads,
            None if callbacks is None else self._hook(callbacks, tokens, rows, memory),
        )
        self.used_bytes = used_bytes + parts.logits_bytes
        return logits

    def _parts(self, tokens: int, rows: int) -> StepParts:
        rows_bytes = self._forward.workspace_bytes(tokens, rows)
        return StepParts(self._attention_bytes, rows_bytes, 4 * rows * self._vocab_size)

    def _memory(self, parts: StepParts) -> torch.Tensor:
        need_bytes = parts.total_bytes
        if self._lent is None:
            if self._own.numel() < need_bytes:
                self._own = torch.empty(need_bytes, dtype=torch.uint8)
            return self._own
        if self._lent.numel() < need_bytes:
            raise ValueError(f"a step of {need_bytes} bytes was lent {self._lent.numel()}")
        return self._lent

    def _logits(self, memory: torch.Tensor, parts: StepParts, rows: int) -> torch.Tensor:
        """In the memory that was lent; in its own they would not outlive the next step."""
        if self._lent is None:
            return torch.empty((rows, self._vocab_size), dtype=torch.float32)
        place = memory[parts.logits_at : parts.logits_at + parts.logits_bytes]
        return place.view(torch.float32).view(rows, self._vocab_size)

    def _hook(
        self, callbacks: LayerCallbacks, tokens: int, rows: int, memory: torch.Tensor
    ) -> Callable[[int, int], None]:
        """Calls the seams with views of the workspace, which are the same in every layer."""
        query, output = (
            memory[start : start + tokens * self._heads * self._head_size * size]
            .view(self._dtype)
            .view(tokens, self._heads, self._head_size)
            for size in (self._dtype.itemsize,)
            for offset in self._forward.attention_offsets(tokens, rows)
            for start in (self._attention_bytes + offset,)
        )
        written, before, after = (
            callbacks.after_kv_write,
            callbacks.before_attend,
            callbacks.after_attend,
        )

        def hook(is_attended: int, layer: int) -> None:
            if is_attended:
                after(layer, output)
            else:
                written(layer)
                before(layer, query)

        return hook

    def _build(self, recipe: DecoderRecipe, instruction_set: str) -> "_forward.Forward":
        from kvell.models import _forward

        layers = [self._matrices(layer) for layer in recipe.layers]
        table = recipe.embedding.weight.detach()
        tied = table.data_ptr() == recipe.head.weight.data_ptr()
        head = self._add(self._forms.weight(recipe.head), None)
        _give_up(recipe.head)
        self._kept += [layers, head, table if not tied else None]
        vocab, hidden = table.shape
        forward = _forward.Forward(
            instruction_set,
            _DTYPES.index(self._dtype),
            (hidden, recipe.heads, recipe.kv_heads, recipe.head_size, layers[0][3].width),
            _ACTIVATIONS[recipe.activation],
            1.0,
            recipe.softcap,
            (0 if tied else table.data_ptr(), vocab, recipe.embedding_scale),
            self._norm(recipe.final_norm),
            head.args,
        )
        for rope in recipe.ropes:
            forward.add_rope(rope.frequencies.tolist(), rope.factor)
        for layer, matrices in zip(recipe.layers, layers, strict=True):
            forward.add_layer(
                [self._norm(norm) for norm in layer.norms],
                [matrix.args for matrix in matrices],
                layer.rope,
                (layer.scale, layer.softcap, layer.window_tokens),
                0,
            )
        return forward

    def _matrices(self, layer: LayerRecipe) -> list[PackedMatrix]:
        """Packed in the order of their use; the layer's own weights are given up."""
        attention, mlp, forms = layer.attention, layer.mlp, self._forms
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        pair = None if gate.bias is None else gated(gate.bias, up.bias)
        made = [
            self._add(join(forms.weights(qkv), torch.cat), _joined(qkv)),
            self._add(forms.weight(attention.o_proj), attention.o_proj.bias),
            self._add(join(forms.weights((gate, up)), lambda both: gated(*both)), pair),
            self._add(widen(forms.weight(down), _inner(mlp)), down.bias),
        ]
        for linear in (*qkv, attention.o_proj, gate, up, down):
            _give_up(linear)
        return made

    def _add(self, weight: Weight, bias: torch.Tensor | None) -> PackedMatrix:
        return self._store.add(weight, bias, self._dtype)

    def _norm(self, norm: NormRecipe | None) -> tuple[int, float]:
        if norm is None:
            return _NO_NORM
        self._kept.append(norm)
        return norm.weight.data_ptr(), norm.epsilon


def lean_decoder(
    module: Any,
    description: ModelDescription,
    kernels: AttentionKernels,
    quantization: str = "none",
    blocks: Mapping[str, GroupedWeight] | None = None,
) -> LeanDecoder | None:
    """A compiled pass over a module's weights, which it takes over; None if there is none.

    There is one for dense models in float32 or bfloat16 on a CPU, where the package was
    compiled; their module then keeps its config, but no linear's weight.

    :param quantization: one of ``quantization.QUANTIZATIONS``.
    :param blocks: weights by the names of the module's parameters, which are kept as they are.
    """
    recipe = _recipe(module, description, kernels)
    if recipe is None:
        return None
    with torch.no_grad():
        forms = WeightForms(module, recipe.head, quantization, blocks or {})
        return LeanDecoder(recipe, kernels, forms, description.max_model_len)  # type: ignore[arg-type]


def _recipe(
    module: Any, description: ModelDescription, kernels: AttentionKernels
) -> DecoderRecipe | None:
    if kernels.name != "native" or module.device.type != "cpu" or module.dtype not in _DTYPES:
        return None
    recipe = recipe_of(module, description)
    weights = [] if recipe is None else [linear.weight for linear in weights_of(recipe)]
    if any(w.dtype != module.dtype or w.shape[1] * w.itemsize % 4 for w in weights):
        return None
    return recipe


def _store_bytes(recipe: DecoderRecipe, forms: WeightForms) -> int:
    shapes: list[Shape] = []
    for layer in recipe.layers:
        attention, mlp = layer.attention, layer.mlp
        width = attention.q_proj.in_features
        inner = _inner(mlp)
        qkv, o_proj = (attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj
        pair = (mlp.gate_proj, mlp.up_proj)
        shapes += [
            (sum(linear.out_features for linear in qkv), width, forms.form(qkv)),
            (o_proj.out_features, o_proj.in_features, forms.form((o_proj,))),
            (2 * inner, width, forms.form(pair)),
            (mlp.down_proj.out_features, inner, forms.form((mlp.down_proj,))),
        ]
    head = recipe.head
    shapes.append((head.out_features, head.in_features, forms.form((head,))))
    return store_bytes(shapes, head.weight.dtype)


def _shape(recipe: DecoderRecipe) -> DecoderShape:
    first, heads = recipe.layers[0], recipe.heads
    return DecoderShape(
        hidden=first.attention.q_proj.in_features,
        attended=heads * recipe.head_size,
        qkv_size=(heads + 2 * recipe.kv_heads) * recipe.head_size,
        inner=_inner(first.mlp),
        rotated=sum(2 * rope.frequencies.numel() for rope in recipe.ropes),
        vocab=recipe.head.out_features,
        element_bytes=recipe.head.weight.dtype.itemsize,
    )


def _inner(mlp: Any) -> int:
    """Width of an MLP, in whole halves of a panel."""
    half = PANEL // 2
    return -(-int(mlp.gate_proj.out_features) // half) * half


def _joined(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return torch.cat(
        [
            torch.zeros(linear.out_features) if linear.bias is None else linear.bias.float()
            for linear in linears
        ]
    )


def _give_up(linear: nn.Linear) -> None:
    """Let go of a weight (of all that share it)."""
    linear.weight.data = linear.weight.new_empty(0)


def _int64(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int64).contiguous()
