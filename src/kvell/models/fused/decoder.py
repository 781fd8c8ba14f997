"""A decoder's compiled pass: built once from a recipe, then one call for each step."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvell.attention.interface import AttentionKernels, LayerPages
from kvell.device.weight_memory import PrivateWeights, WeightMemory
from kvell.elastic.arena import StepBuffers
from kvell.models.config.description import ModelDescription
from kvell.models.forward.forward_batch import ForwardBatch
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.fused.forms import WeightForms
from kvell.models.fused.grouped import GroupedWeight
from kvell.models.fused.need import StepParts, align
from kvell.models.fused.parts import NormRecipe
from kvell.models.fused.recipe import DecoderRecipe, LayerRecipe, recipe_of, weights_of
from kvell.models.fused.room import Room
from kvell.models.fused.skeleton import DecoderSkeleton
from kvell.models.fused.states import state_args
from kvell.models.fused.step_args import group_args, host_rows, states_args
from kvell.models.fused.team import PassRecord, TeamRule
from kvell.models.fused.weights import LayerMatrices, PackedWeights, in_memory
from kvell.models.partials.remote_sections import RemoteSections
from kvell.models.partials.served_layers import ServedLayer, ServedLayers
from kvell.models.states.state_memory import StateMemory

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels
    from kvell.models.fused import _forward

_DTYPES = (torch.float32, torch.bfloat16)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_NO_NORM = (0, 0.0)


class FusedDecoder:
    """All layers of a step in one call of compiled code.

    A token's logits depend on its own context alone, to the last bit: neither the batch, nor
    prefill chunks, nor the positions of pages, nor threads change them. The exception is a mixer
    whose states are stored in 16 bits: they are rounded at the end of a step.

    Not for concurrent use.

    :ivar state_shapes: shapes of the state of each layer with a mixer, in order.
    :ivar team: the rule for threads that share their processors with other programs.
    :ivar passed: the record of the last pass; None: there was none.
    :ivar elsewhere: the creditors of remote sections; None: there are none.
    :ivar served_layers: its layers' pages, once they are attached.
    :ivar largest: index of each row's largest logit (the first of equals) in the last step, if the
        step requested it.
    """

    def __init__(
        self,
        recipe: DecoderRecipe,
        kernels: "NativeKernels",
        forms: WeightForms,
        longest_tokens: int,
        memory: WeightMemory,
        maps_table: bool,
    ) -> None:
        """Pack the recipe's weights and free the modules' own; tied ones are packed once.

        :param forms: how each weight is stored.
        :param longest_tokens: longest context that attention may split among threads.
        :param memory: for packed weights, and for embeddings that are neither tied nor mapped.
        :param maps_table: embeddings of the model's dtype are used in place.
        """
        self._threads = kernels.num_threads or torch.get_num_threads()
        self.team = TeamRule(self._threads, is_fixed=kernels.num_threads > 0)
        self._dtype = recipe.dtype
        self._vocab_size: int = recipe.head.weight.shape[0]
        self._heads, self._head_size = recipe.heads, recipe.head_size
        self._kept: list[Any] = []
        self._groups: list[int] = []
        self._state_groups: list[int] = []
        table = recipe.embedding.weight
        tied = table.data_ptr() == recipe.head.weight.data_ptr()
        self._weights = PackedWeights(recipe, forms, self._threads, memory)
        if not tied and not (maps_table and table.dtype == self._dtype):
            table.data = in_memory(memory, table.data, self._dtype, "embeddings")
        self._table = None if tied else table.detach()
        self._shape = recipe.shape
        self.state_shapes = recipe.state_shapes
        self._kernels = kernels
        self._full = [layer.window_tokens == 0 for layer in recipe.layers]
        self._full_groups: list[int] = []
        self.served_layers: ServedLayers | None = None
        self.elsewhere: RemoteSections | None = None
        self._forward = self._build(recipe, kernels.instruction_set)
        self._attention_bytes = align(self._forward.attention_bytes(self._threads, longest_tokens))
        self._given: torch.Tensor | None = None
        self._own = torch.empty(0, dtype=torch.uint8)
        self._room: Room | None = None
        self.used_bytes = 0
        self.passed: PassRecord | None = None
        self.largest: list[int] = []

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights; untied embeddings stay in the module."""
        return self._weights.used_bytes

    @property
    def buffers(self) -> StepBuffers:
        """Memory that a step needs besides weights and pages: all its buffers, and its logits."""
        return self._shape.buffers(self._attention_bytes)

    def use_memory(self, given: torch.Tensor | None) -> None:
        """Compute in given memory, uint8 [any number], from now on; None for memory of its own.

        A step's logits are in it too, until the next step. Several models may share it if they take
        turns.
        """
        self._given = given
        self._room = None

    def attach(
        self,
        pages: Mapping[int, LayerPages],
        groups: Mapping[int, int],
        states: StateMemory | None = None,
    ) -> None:
        """Set each layer's memory of keys and values, and the index of its group.

        :param states: the same for layers with a mixer.
        """
        from kvell.attention.native import layer_args

        held = states.pages if states is not None else {}
        of_states = states.groups if states is not None else {}
        self._kept_pages = [*pages.values(), *held.values()]
        self._groups = sorted(set(groups.values()))
        self._state_groups = sorted(set(of_states.values()))
        layers = [
            ServedLayer(pages[index], groups[index], is_full)
            for index, is_full in zip(sorted(pages), self._full, strict=True)
        ]
        self.served_layers = ServedLayers.of(self._kernels, layers)
        full = self.served_layers.full_groups if self.served_layers else ()
        self._full_groups = [self._groups.index(group) for group in full]
        self._forward.attach(
            [layer_args(pages[index]) for index in sorted(pages)],
            [self._groups.index(groups[index]) for index in sorted(pages)],
            [
                state_args(held[index], self._state_groups.index(of_states[index]))
                for index in sorted(held)
            ],
        )

    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        """Compute a step and return logits, float32 [rows, vocab].

        The logits last only until the next step if ``batch.wants_largest`` or if memory was
        given; otherwise they are the caller's own.

        :raises ValueError: if an id, row or page does not exist, metadata disagree, or the step
            needs more memory than it was given.
        :raises RuntimeError: if a group has metadata of another kind than its layers.
        """
        rows = host_rows(batch)
        groups = batch.groups
        room = self._room_for(rows.sizes[0], rows.sizes[2])
        lasts = self._given is None and not batch.wants_largest
        logits = torch.empty_like(room.logits) if lasts else room.logits
        parts, at = room.parts, room.address
        ids, positions, wanted = rows.addresses
        way = self.team.way(room.tokens)
        call = (
            (room.tokens, ids, positions),
            (room.rows, wanted),
            [group_args(groups[index], room.tokens) for index in self._groups],
            [states_args(groups[index]) for index in self._state_groups],
            (at + parts.attention_bytes, parts.rows_bytes),
            (at, parts.attention_bytes),
            logits.data_ptr() if lasts else at + parts.logits_at,
            batch.wants_largest,
            way,
            None if callbacks is None else self._hook(callbacks, room),
            None if self.elsewhere is None else self.elsewhere.to_compiled(self._full_groups),
        )
        if batch.begun is not None:
            batch.begun()
        used_bytes, self.largest, took_ns, lost_ns = self._forward.run(*call)
        self.passed = PassRecord(way, took_ns, lost_ns)
        self.team.note(self.passed)
        self.used_bytes = used_bytes + parts.logits_bytes
        return logits

    def hidden(self) -> torch.Tensor:
        """Return the final norm's output of the last step's logits rows, [rows, hidden].

        It is a view of the step's memory, which the next step writes.
        """
        assert self._room is not None, "only a step that was computed has rows"
        return self._room.hidden(self._shape.hidden, self._dtype)

    def _room_for(self, tokens: int, rows: int) -> Room:
        room = self._room
        if room is None or room.tokens != tokens or room.rows != rows:
            room = self._room = self._made_room(tokens, rows)
        return room

    def _made_room(self, tokens: int, rows: int) -> Room:
        rows_bytes = self._forward.workspace_bytes(tokens, rows)
        parts = StepParts(self._attention_bytes, rows_bytes, 4 * rows * self._vocab_size)
        memory = self._memory(parts.total_bytes)
        logits = memory[parts.logits_at : parts.logits_at + parts.logits_bytes]
        in_rows = logits.view(torch.float32).view(rows, self._vocab_size)
        return Room(tokens, rows, parts, memory, memory.data_ptr(), in_rows)

    def _memory(self, need_bytes: int) -> torch.Tensor:
        if self._given is None:
            if self._own.numel() < need_bytes:
                self._own = torch.empty(need_bytes, dtype=torch.uint8)
            return self._own
        if self._given.numel() < need_bytes:
            raise ValueError(f"a step of {need_bytes} bytes was given only {self._given.numel()}")
        return self._given

    def _hook(self, callbacks: LayerCallbacks, room: Room) -> Callable[[int, int], None]:
        """Make a hook that calls the callbacks; its views of the workspace serve every layer."""
        tokens, rows = room.tokens, room.rows
        query, output = (
            room.memory[start : start + tokens * self._heads * self._head_size * size]
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
        from kvell.models.fused import _forward

        table = 0 if self._table is None else self._table.data_ptr()
        forward = _forward.Forward(
            instruction_set,
            _DTYPES.index(self._dtype),
            (
                self._shape.hidden,
                recipe.heads,
                recipe.kv_heads,
                recipe.head_size,
                self._shape.inner,
            ),
            _ACTIVATIONS[recipe.activation],
            recipe.softcap,
            (table, recipe.embedding.num_embeddings, recipe.embedding_scale),
            self._norm(recipe.final_norm),
            self._weights.head.args,
        )
        for rope in recipe.ropes:
            forward.add_rope(rope.frequencies.tolist(), rope.factor)
        for layer, matrices in zip(recipe.layers, self._weights.layers, strict=True):
            self._add_layer(forward, layer, matrices)
        return forward

    def _add_layer(
        self, forward: "_forward.Forward", layer: LayerRecipe, matrices: LayerMatrices
    ) -> None:
        made = (matrices.inputs, matrices.out, matrices.gates, matrices.down)
        forward.add_layer(
            [self._norm(norm) for norm in layer.norms],
            [matrix.args for matrix in made],
            (layer.out_factor, layer.down_factor),
            layer.rope,
            (layer.scale, layer.softcap, layer.window_tokens),
        )
        mixer = layer.mixer
        if mixer is None or matrices.mixed is None:
            return
        shape = mixer.shape
        constants = (
            mixer.convolution,
            mixer.convolution_bias,
            mixer.step_bias,
            mixer.decays,
            mixer.skips,
        )
        self._kept.append(constants)
        forward.add_mixer(
            (shape.heads, shape.head_size, shape.groups, shape.state_size, shape.window),
            tuple(values.data_ptr() for values in constants),  # type: ignore[arg-type]
            (*mixer.steps, mixer.norm_before_gate, mixer.out_factor),
            self._norm(mixer.norm),
            matrices.mixed.args,
        )

    def _norm(self, norm: NormRecipe | None) -> tuple[int, float]:
        if norm is None:
            return _NO_NORM
        self._kept.append(norm)
        return norm.weight.data_ptr(), norm.epsilon


def fused_decoder(
    module: Any,
    description: ModelDescription,
    kernels: AttentionKernels,
    quantization: str = "none",
    blocks: Mapping[str, GroupedWeight] | None = None,
    memory: WeightMemory | None = None,
) -> FusedDecoder | None:
    """Make the compiled pass of a module and take over its weights; return None if it has none.

    Dense models, and hybrids with Mamba 2 next to attention in every layer, have one in float32 or
    bfloat16 on a CPU, if the package was compiled. The module then keeps its config, but no
    linear's weight.

    :param quantization: one of ``quantization.QUANTIZATIONS``.
    :param blocks: weights by the names of the module's parameters, used unchanged.
    :param memory: for the weights; this process's own if not given.
    """
    memory = memory or PrivateWeights()
    recipe = _recipe(module, description, kernels)
    if recipe is None:
        return None
    with torch.no_grad():
        forms = WeightForms(module, recipe.head, quantization, blocks or {})
        # A skeleton's tensors are its files, which all processes map anyway.
        maps_table = isinstance(module, DecoderSkeleton) or not memory.is_shared
        longest = description.max_model_len
        return FusedDecoder(recipe, kernels, forms, longest, memory, maps_table)  # type: ignore[arg-type]


def _recipe(
    module: Any, description: ModelDescription, kernels: AttentionKernels
) -> DecoderRecipe | None:
    dtype = module.dtype
    if not takes(kernels, module.device, dtype):
        return None
    recipe = recipe_of(module, description)
    weights = [] if recipe is None else [linear.weight for linear in weights_of(recipe)]
    rounds = isinstance(module, DecoderSkeleton)
    if any((w.dtype != dtype and not rounds) or w.shape[1] * dtype.itemsize % 4 for w in weights):
        return None
    return recipe


def takes(kernels: AttentionKernels, device: torch.device, dtype: torch.dtype) -> bool:
    return kernels.name == "native" and device.type == "cpu" and dtype in _DTYPES
