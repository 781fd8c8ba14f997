"""A decoder's compiled pass: built once from a recipe, then one call for each step.

:class:`TeamRule` chooses how its threads share their processors with other programs.

Alone on its processors a team is fastest if every thread keeps its own part and all meet after each
phase. With another program on one of them all wait for the thread that the system suspends in the
middle of a share: one busy program halved the speed of both. So a team with such a neighbour takes
shares dynamically, and the threads that lose time rest between two shares, which leaves the
neighbour time in which no thread waits for it. No answer depends on either.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvell.attention.checks import int32_pointer
from kvell.attention.host_batch import HostGroupBatch, HostRows, HostStateBatch
from kvell.attention.interface import AttentionKernels, GroupBatch, LayerPages
from kvell.attention.states import StateBatch
from kvell.device.weight_memory import PrivateWeights, WeightMemory
from kvell.elastic.arena import StepBuffers
from kvell.models.config.description import ModelDescription
from kvell.models.forward.forward_batch import ForwardBatch, HostForwardBatch
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.fused.grouped import BlockWeight
from kvell.models.fused.need import FLOAT_BYTES, StepParts, align
from kvell.models.fused.parts import NormRecipe
from kvell.models.fused.recipe import DecoderRecipe, LayerRecipe, recipe_of, weights_of
from kvell.models.fused.skeleton import EMBEDDING, DecoderSkeleton
from kvell.models.fused.weights import LayerMatrices, PackedWeights, WeightForms, in_memory
from kvell.models.partials.remote_sections import RemoteSections
from kvell.models.partials.served_layers import ServedLayer, ServedLayers
from kvell.models.states.state_memory import StateMemory
from kvell.models.states.state_pages import StatePages

if TYPE_CHECKING:
    from kvell.attention.native import NativeKernels
    from kvell.models.fused import _forward

SHARED_ABOVE, ALONE_BELOW = 0.35, 0.22
"""Parts of a pass that its threads lose together. Above the first, a team shares its processors;
below the second, it runs as if alone again: rests cost decodes a fifth of their speed, and as if
alone a team loses about as much as its threads do. A program that is busy a fifth of the time stays
below."""

WEIGHT = 1 / 16
"""Weight of the newest step in the average loss of threads."""

MOST_RESTING_TOKENS = 64
"""Longer steps lose more by rests than they gain: their phases are as long as the time for which
the system suspends a thread."""

RESTS_ABOVE = 0.05
"""A thread with a larger average loss rests."""

WORK_NS, REST_NS = 100_000, 50_000


class Way(NamedTuple):
    """The schedule of a pass, in the form of the compiled pass (``csrc/forward/neighbours.h``).

    :param is_shared: others run on its processors, so no thread waits for one without a share.
    :param resting: by bit: threads that rest between shares.
    :param work_ns: time that a thread works between two rests.
    :param rest_ns: duration of a rest.
    """

    threads: int
    is_shared: bool = False
    resting: int = 0
    work_ns: int = WORK_NS
    rest_ns: int = REST_NS


class PassRecord(NamedTuple):
    """The record of a pass: its duration, and the losses of its threads.

    :param took_ns: from its begin to its end.
    :param lost_ns: each thread's time in which it could have run and another program did.
    """

    way: Way
    took_ns: int
    lost_ns: Sequence[int]


class TeamRule:
    """Choice of the schedule of every pass; a neighbour seen by one kind of step counts for all.

    :param is_fixed: the team always runs as if it were alone.
    """

    def __init__(self, threads: int, *, is_fixed: bool = False) -> None:
        self._alone = self._short = self._long = Way(threads)
        self._is_fixed = is_fixed or threads == 1
        self._lost = [0.0] * threads  # average part of a pass that each loses

    def way(self, tokens: int) -> Way:
        return self._short if tokens <= MOST_RESTING_TOKENS else self._long

    def note(self, passed: PassRecord) -> None:
        if self._is_fixed:
            return
        took_ns = max(1, passed.took_ns)
        self._lost = [
            mean + WEIGHT * (lost_ns / took_ns - mean)
            for mean, lost_ns in zip(self._lost, passed.lost_ns, strict=True)
        ]
        if sum(self._lost) > (ALONE_BELOW if self._long.is_shared else SHARED_ABOVE):
            self._long = self._alone._replace(is_shared=True)
            self._short = self._long._replace(resting=_resting(self._lost))
        else:
            self._short = self._long = self._alone


def _resting(lost: Sequence[float]) -> int:
    """Return the threads that lose time, by bit, without the caller's own.

    If only the caller's thread loses, the last rests for it: the system moves the neighbour to a
    processor that is idle now and then.
    """
    losing = [index for index, part in enumerate(lost) if part > RESTS_ABOVE and index > 0]
    return sum(1 << index for index in losing or [len(lost) - 1] if index < 64)


Rows = tuple[int, int, int]
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


def state_args(pages: StatePages, group: int) -> tuple[Rows, Rows, int, int, int]:
    """Return a layer's memory of states, and the index of its metadata.

    :param group: index of the layer's metadata among a step's metadata of states.
    :raises ValueError: if the compiled pass does not support the dtype of the states.
    """
    assert pages.recurrent is not None, "a mixer has a recurrent state"
    count = pages.window.shape[0]
    return _rows(pages.window), _rows(pages.recurrent), count, pages.part, group


def states_args(batch: object) -> tuple[tuple[int, int, int], list[int]]:
    """Return a step's metadata of a group of states, in the compiled pass's form.

    :raises ValueError: if its parts disagree in length, or are not int32 in host memory.
    :raises RuntimeError: if the step has none, or of another kind.
    """
    if not isinstance(batch, StateBatch):
        raise RuntimeError("the step has no metadata for a group of states")
    if isinstance(batch, HostStateBatch):
        return batch.args
    requests, slices = batch.page_ids.shape
    cuts = batch.cut_requests.shape[0]
    ends = batch.end_page_ids
    if batch.query_starts.shape[0] != requests + 1 or batch.starts.shape[0] != requests:
        raise ValueError(f"states: starts are not those of {requests} requests")
    if batch.cut_tokens.shape[0] != cuts or batch.cut_page_ids.shape != (cuts, slices):
        raise ValueError(f"states: {cuts} cuts need as many tokens, and {slices} pages each")
    if ends is not None and ends.shape != (requests, slices):
        raise ValueError(f"states: {requests} requests end in {slices} pages each")
    tables = {
        "query_starts": batch.query_starts,
        "starts": batch.starts,
        "page_ids": batch.page_ids,
        "cut_requests": batch.cut_requests,
        "cut_tokens": batch.cut_tokens,
        "cut_page_ids": batch.cut_page_ids,
    }
    pointers = [int32_pointer(name, table) for name, table in tables.items()]
    pointers.append(0 if ends is None else int32_pointer("end_page_ids", ends))
    return (requests, cuts, slices), pointers


def _rows(rows: torch.Tensor) -> Rows:
    if rows.dtype not in _ELEMENTS:
        raise ValueError(f"states of {rows.dtype} are not served by the compiled pass")
    return rows.data_ptr(), rows.stride(0) * rows.itemsize, _ELEMENTS[rows.dtype]


def group_args(
    group: object, tokens: int
) -> tuple[tuple[int, int, int, int, int, int, int, int], int, int]:
    """Return metadata of a group of keys and values, and the places of the new tokens.

    :raises RuntimeError: if the step has none, or of another kind.
    """
    if isinstance(group, HostGroupBatch):
        return ((*group.args, tokens), *group.writes)
    if not isinstance(group, GroupBatch):
        raise RuntimeError("the step has no metadata for a group of keys and values")
    from kvell.attention.native import batch_args

    writes = (group.write_page_ids.data_ptr(), group.write_offsets.data_ptr())
    return (batch_args(group, tokens), *writes)


def host_rows(batch: ForwardBatch) -> HostRows:
    if isinstance(batch, HostForwardBatch):
        return batch.rows
    parts = (batch.token_ids, batch.positions, batch.logits_rows)
    return HostRows.of([part.numpy() for part in parts], np.int64)


@dataclass(frozen=True)
class Room:
    """Memory of a step with a given number of tokens and of logits rows."""

    tokens: int
    rows: int
    parts: StepParts
    memory: torch.Tensor
    address: int
    logits: torch.Tensor

    def hidden(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the head's input: the final norm's output of each logits row, [rows, size].

        It is stored after the stream, where every norm writes (``csrc/forward/workspace.cpp``), and
        lasts only until the next step.
        """
        start = self.parts.attention_bytes + align(FLOAT_BYTES * size * self.tokens)
        numbers = self.memory[start : start + self.rows * size * dtype.itemsize]
        return numbers.view(dtype).view(self.rows, size)


_DTYPES = (torch.float32, torch.bfloat16)
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_NO_NORM = (0, 0.0)


class FusedDecoder:
    """All layers of a step in one call of compiled code.

    A token's logits depend on its own context alone, to the last bit: neither the batch, nor
    prefill chunks, nor the positions of pages, nor threads change them. The exception is a mixer
    whose states are stored in 16 bits: they are rounded at the end of a step.

    Not for concurrent use.

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
    blocks: Mapping[str, BlockWeight] | None = None,
    memory: WeightMemory | None = None,
) -> FusedDecoder | None:
    """Make the compiled pass of a module and take over its weights; return None if it has none.

    Dense models, and hybrids with Mamba 2 next to attention in every layer, have one in float32 or
    bfloat16 on a CPU, if the package was compiled. The module then keeps its config, but no
    linear's weight.

    :param blocks: weights by the names of the module's parameters, kept in their form.
    """
    memory = memory or PrivateWeights()
    recipe = _recipe(module, description, kernels)
    if recipe is None:
        return None
    with torch.no_grad():
        forms = WeightForms(module, recipe.head, quantization, blocks or {})
        # A skeleton's tensors are its files, which all processes map anyway.
        is_mapped = isinstance(module, DecoderSkeleton) and EMBEDDING not in (blocks or {})
        maps_table = is_mapped or not memory.is_shared
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
