"""A step computed by transformers' own modules: their attention reads and writes pages.

No mask is built and no transformers cache exists: each layer writes the step's keys and values
into the pages of its group and attends over them.

Attention in both directions within a prompt, over causal kernels.

Each such token becomes a request of its own whose context is the whole prompt: the last position of
a context attends to all of it, and the window is switched off.

Token dropping: the choice of a long prompt's tokens that stay, and their move to the front.

When a prompt that is longer than a layer's budget has been computed, its last ``OBSERVED_TOKENS``
tokens vote for the earlier ones with the attention that they pay to them::

    votes[head, j] = Σ over observing tokens, over query heads of the KV head, of softmax(q·k)[j]

Votes are max-pooled over ``POOLED_TOKENS`` neighbours, so that a token's surroundings stay with it.
The best tokens fill the budget besides the observing tokens, which always stay; of equal tokens the
earlier one stays. Each KV head chooses for itself, and a latent (MLA) is one head. Then rows 0 …
budget-1 of a layer's pages hold, head by head, the kept keys and values in order of position; keys
keep the rope of their true positions, so attention needs no change. The token after the prompt is
stored in row ``budget``.

Sources: SnapKV §4 (observation window, pooling), PyramidKV §4.2; budgets by layer:
:mod:`kvell.models.config.budgets`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn.functional import max_pool1d

from kvell.attention.interface import AttendParams, AttentionKernels, GroupBatch, LayerPages
from kvell.attention.quantised import dequantise
from kvell.attention.sections import SectionKernels, SectionRecords
from kvell.attention.spans import page_views
from kvell.models.config.activations import activation_model
from kvell.models.config.budgets import OBSERVED_TOKENS
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import MIXER_KINDS, WITH_IMAGES
from kvell.models.forward import hook
from kvell.models.forward.forward_batch import ForwardBatch, ModelMemory
from kvell.models.forward.image_side import ImageSide, text_attention
from kvell.models.forward.latents import place_latents
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.forward.true_positions import RopeTables, TruePositions, asks_a_cache
from kvell.models.images.image_batch import SeenImages
from kvell.models.images.image_store import ImageStore
from kvell.models.partials.remote_sections import LayerQueries, RemoteSections
from kvell.models.partials.served_layers import ServedLayer, ServedLayers
from kvell.models.states.mixer_slots import during, place_mixers
from kvell.models.states.state_step import StatePass
from kvell.pages.layout import IMAGE_KINDS, GroupKind, LayerSpec, Layout

POOLED_TOKENS = 7


def votes(query: torch.Tensor, key: torch.Tensor, params: AttendParams) -> torch.Tensor:
    """Return the sum of the attention of a prompt's last tokens to each of its tokens.

    :param query: [observing, heads, head_size], one KV head's query heads, of the last tokens.
    :param key: [tokens, head_size], of that KV head; the prompt's tokens in order.
    :param params: sinks are those of the given heads.
    :return: float32 [tokens].
    """
    observing, tokens = query.shape[0], key.shape[0]
    scores = query.float().transpose(0, 1) @ key.float().T * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    own = torch.arange(tokens - observing, tokens, device=key.device)
    later = torch.arange(tokens, device=key.device) > own[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    paid = scores.softmax(-1)
    if params.sinks is not None:  # a sink's share is paid to no token
        paid = paid * torch.sigmoid(scores.logsumexp(-1) - params.sinks[:, None])[..., None]
    return paid.sum((0, 1))


def kept_positions(votes: torch.Tensor, budget_tokens: int) -> torch.Tensor:
    """Return the positions that stay, ascending: int64 [budget_tokens].

    :param votes: float32 [tokens] of a prompt longer than the budget.
    :param budget_tokens: more than ``OBSERVED_TOKENS``, which stay in any case.
    """
    earlier = votes.shape[0] - OBSERVED_TOKENS
    pooled = max_pool1d(votes[None, :earlier], POOLED_TOKENS, 1, POOLED_TOKENS // 2)[0]
    best = pooled.sort(descending=True, stable=True).indices[: budget_tokens - OBSERVED_TOKENS]
    observing = torch.arange(earlier, votes.shape[0], device=votes.device)
    return torch.cat([best.sort().values, observing])


def keep_rows(layer: LayerPages, page_ids: torch.Tensor, kept: torch.Tensor) -> None:
    """Move the kept rows of a request's pages to the front; later rows become undefined.

    :param page_ids: [pages], the request's, in order of position.
    :param kept: int64 [kv_heads, budget], ascending for each head.
    """
    pages = page_ids.long()
    size = layer.page_tokens
    heads = torch.arange(layer.kv_heads, device=kept.device)[:, None]
    front = torch.arange(kept.shape[1], device=kept.device)
    for stored in page_views(layer):
        rows = stored[pages[kept // size], heads, kept % size]
        stored[pages[front // size], heads, front % size] = rows


class TokenDropping:
    """Token dropping in one step: chooses while layers attend, moves after all have.

    Layers that share another's keys and values read them later, so nothing may move earlier.

    :param ends: requests, by their index in the batch, whose prompts end with this step.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._moves: list[tuple[LayerPages, torch.Tensor, torch.Tensor]] = []

    def choose(
        self,
        budget_tokens: int,
        layer: LayerPages,
        group: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
    ) -> None:
        """Choose the tokens to keep of prompts that end here and are longer than the budget.

        :param query: [T, heads, head_size] of the whole step.
        """
        for request in self._ends:
            tokens = int(group.context_lens[request])
            if tokens > budget_tokens:
                last = int(group.query_starts[request + 1])
                table = slice(*group.table_starts[request : request + 2].tolist())
                pages, observing = group.page_ids[table], query[last - OBSERVED_TOKENS : last]
                kept = _kept(layer, pages, tokens, observing, params, budget_tokens)
                self._moves.append((layer, pages, kept))

    def move(self) -> None:
        """Move the kept tokens to the front of their pages; call when the step is computed."""
        for layer, pages, kept in self._moves:
            keep_rows(layer, pages, kept)
        self._moves.clear()


def _kept(
    layer: LayerPages,
    pages: torch.Tensor,
    tokens: int,
    query: torch.Tensor,
    params: AttendParams,
    budget_tokens: int,
) -> torch.Tensor:
    """Return the kept positions, int64 [kv_heads, budget]; one head at a time, to save memory."""
    by_head = query.reshape(query.shape[0], layer.kv_heads, -1, query.shape[2])
    sinks = None if params.sinks is None else params.sinks.view(layer.kv_heads, -1)
    chosen = []
    for head in range(layer.kv_heads):
        own = AttendParams(
            params.scale, softcap=params.softcap, sinks=None if sinks is None else sinks[head]
        )
        paid = votes(by_head[:, head], _keys(layer, pages, tokens, head), own)
        chosen.append(kept_positions(paid, budget_tokens))
    return torch.stack(chosen)


def _keys(layer: LayerPages, pages: torch.Tensor, tokens: int, head: int) -> torch.Tensor:
    """Return a head's stored keys of a request, [tokens, head_size], dequantised if quantised."""
    rows = page_views(layer)[0][pages.long(), head].flatten(0, 1)[:tokens]
    return dequantise(rows, layer.dtype) if layer.quantised else rows


class BothDirections:
    """The prompts of one step with attention in both directions."""

    def __init__(self, prefix_tokens: tuple[int, ...]) -> None:
        """Take the prompts of a step.

        :param prefix_tokens: such tokens of each request of the step; 0 if all of it is causal.
        """
        self._prefixes = [(i, count) for i, count in enumerate(prefix_tokens) if count]
        self._batches: dict[int, GroupBatch] = {}

    def attend(
        self,
        kernels: AttentionKernels,
        pages: LayerPages,
        batch: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
        elsewhere: SectionRecords | None = None,
    ) -> torch.Tensor:
        """Attend as the kernels do, [T, heads, size], but in both directions in such prompts.

        :param elsewhere: records of remote sections, which no such prompt has yet.
        """
        if elsewhere is None:
            output = kernels.attend(pages, batch, query, params)
        else:
            of_sections = cast(SectionKernels, kernels)
            output = of_sections.attend(pages, batch, query, params, elsewhere)
        if self._prefixes:
            rows = self._rows(batch)
            if id(batch) not in self._batches:
                self._batches[id(batch)] = self._apart(batch)
            apart = self._batches[id(batch)]
            whole = replace(params, window_tokens=0)
            output[rows] = kernels.attend(pages, apart, query[rows], whole)
        return output

    def _rows(self, batch: GroupBatch) -> torch.Tensor:
        starts = batch.query_starts.tolist()
        spans = [torch.arange(starts[i], starts[i] + n) for i, n in self._prefixes]
        return torch.cat(spans).to(batch.query_starts.device)

    def _apart(self, batch: GroupBatch) -> GroupBatch:
        """Return metadata with every token of the prompts as a request of one token."""
        size_of = batch.table_starts.diff().tolist()
        begins = batch.table_starts.tolist()
        contexts = []
        counts = []
        tables: list[torch.Tensor] = []
        for i, count in self._prefixes:
            table = batch.page_ids[begins[i] : begins[i] + size_of[i]]
            tables.append(table.repeat(count))
            contexts += [count] * count
            counts += [size_of[i]] * count
        device = batch.page_ids.device
        lens = torch.tensor(contexts, dtype=torch.int32, device=device)
        return GroupBatch(
            query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32, device=device),
            context_lens=lens,
            table_starts=torch.tensor([0, *counts], device=device).cumsum(0).int(),
            page_ids=torch.cat(tables),
            first_positions=torch.zeros_like(lens),
            write_page_ids=lens[:0],
            write_offsets=lens[:0],
        )


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


_ELSEWHERE = IMAGE_KINDS | {GroupKind.STATE}
"""Kinds of layers, or of their parts, that do not use the attention hook."""


class ModulePass:
    """A transformers causal LM whose attention and states run over pages.

    :ivar state_shapes: shapes of the state of each layer that has one, in order.
    :ivar latent_sizes: by layer that stores latents: the size of a key's part that is its value.
    :ivar activations: estimate, from the config, of a step's memory besides weights and pages.
    :ivar elsewhere: the creditors of remote sections; None: there are none.
    :ivar served_layers: the pages of layers that use the attention hook, once they are attached;
        None: no service reads them as the kernels do.
    """

    def __init__(
        self, module: Any, description: ModelDescription, kernels: AttentionKernels
    ) -> None:
        """Take over the module: its attention implementation is set here."""
        hook.install()
        has_images = type(module).__name__ in WITH_IMAGES
        text_attention(module, has_images)
        self._module, self._description, self._kernels = module, description, kernels
        self._mixers = place_mixers(module, description, MIXER_KINDS)
        self._asks_a_cache = asks_a_cache(module)
        self._rope_tables = RopeTables(module)
        self._image_side = ImageSide(module, description, kernels) if has_images else None
        self._memory: ModelMemory | None = None
        self._head_input = HeadInput(module)
        self.latent_sizes = place_latents(module, description)
        self.state_shapes = {slot.layer: slot.mixer.shapes for slot in self._mixers}
        self.activations = activation_model(module.config)
        self.served_layers: ServedLayers | None = None
        self.elsewhere: RemoteSections | None = None

    @property
    def images(self) -> ImageStore | None:
        """The images of requests in flight; None if the model takes text only."""
        return self._image_side.store if self._image_side else None

    def attach(self, layout: Layout, pool: torch.Tensor, memory: ModelMemory) -> None:
        """Set the memory for keys, values, states and image embeddings."""
        self._memory = memory
        layers = [
            ServedLayer(memory.pages[x.index], memory.groups[x.index], x.kind is GroupKind.FULL)
            for x in hook_layers(self._description)
        ]
        self.served_layers = ServedLayers.of(self._kernels, layers)
        if self._image_side:
            self._image_side.attach(layout, pool, memory.pages)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        """Compute a step, as :meth:`PagedModel.forward`."""
        assert self._memory is not None, "attach memory first"
        step = _PagedStep(self._memory, self._description, self._kernels, batch, callbacks)
        if self.elsewhere is not None and self.served_layers is not None:
            num_tokens = len(batch.token_ids)
            step.queries = self.elsewhere.layer_queries(
                self.served_layers, batch.groups, num_tokens
            )
        states = StatePass(self._memory.states, batch.groups)
        with (
            during(self._mixers, states),
            self._head_input.recording(batch.wants_hidden),
            self._rope_tables.of_step(batch.long_rope),
        ):
            logits = self._run(batch, step)
        step.require_complete()
        states.require_complete()
        step.dropping.move()
        return logits.float()

    def hidden(self) -> torch.Tensor:
        """Return the head's input in the last step that requested it, float32 [rows, hidden]."""
        return self._head_input.rows()

    def _run(self, batch: ForwardBatch, step: "_PagedStep") -> torch.Tensor:
        """Run transformers' own forward pass; return logits [rows, vocab]."""
        if self._image_side:
            ids, positions, rows = batch.token_ids, batch.positions, batch.logits_rows
            return self._image_side.forward(ids, positions, rows, batch.images, step)
        output = self._module(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            past_key_values=TruePositions(batch.positions) if self._asks_a_cache else None,
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            **{hook.STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def hook_layers(description: ModelDescription) -> list[LayerSpec]:
    return [layer for layer in description.layers if layer.kind not in _ELSEWHERE]


class _PagedStep:
    """One forward pass, with each layer's pages and its group's metadata.

    :ivar queries: for sections that creditors compute; None: all are local.
    """

    def __init__(
        self,
        memory: ModelMemory,
        description: ModelDescription,
        kernels: AttentionKernels,
        batch: ForwardBatch,
        callbacks: LayerCallbacks | None,
    ) -> None:
        self._memory = memory
        self._specs = hook_layers(description)
        self._across = [x.index for x in description.layers if x.kind is GroupKind.CROSS]
        self._kernels = kernels
        self._groups = batch.groups
        self._images = batch.images
        self._both = BothDirections(batch.images.prefix_tokens if batch.images else ())
        self._callbacks = callbacks
        self._attended = 0
        self.dropping = TokenDropping(batch.prompt_ends)
        self.queries: LayerQueries | None = None

    def attend(self, call: hook.LayerCall) -> torch.Tensor:
        """Write the new keys and values, then attend (hook.Step)."""
        spec = self._expect(call)
        pages = self._memory.pages[spec.index]
        group = self._groups[self._memory.groups[spec.index]]
        assert isinstance(group, GroupBatch)
        callbacks = self._callbacks
        params = call.params
        if spec.kind is GroupKind.CHUNKED:
            params = replace(params, chunk_tokens=spec.window_tokens)
        if self.queries is not None:
            self.queries.send_rows(self._attended - 1, call.query, params)
        if spec.kv_of is None:
            value = None if call.value is None else _stored(call.value, pages)
            self._kernels.write_kv(pages, group, _stored(call.key, pages), value)
        if spec.kind is GroupKind.DROPPING:
            self.dropping.choose(spec.window_tokens, pages, group, call.query, params)
        if callbacks is not None:
            callbacks.after_kv_write(spec.index)
            callbacks.before_attend(spec.index, call.query)
        records = None if self.queries is None else self.queries.take_records()
        output = self._both.attend(self._kernels, pages, group, call.query, params, records)
        if callbacks is not None:
            callbacks.after_attend(spec.index, output)
        return output

    def seen_by(self, layer: int) -> Sequence[SeenImages]:
        """Return the images that the step's tokens attend to in a layer (hook.Step)."""
        if not self._across or self._across.pop(0) != layer:
            raise RuntimeError(f"layer {layer} cross-attends out of turn")
        return self._images.seen if self._images else ()

    def require_complete(self) -> None:
        """Raise unless every layer attended: else the model has a mixer that bypasses the hook.

        :raises RuntimeError: if a layer did not.
        """
        if self._across:
            raise RuntimeError(f"layers {self._across} did not cross-attend")
        if self._attended != len(self._specs):
            raise RuntimeError(f"{self._attended} of {len(self._specs)} layers attended over pages")

    def _expect(self, call: hook.LayerCall) -> LayerSpec:
        """Check that layers attend in order, each once, with the window of their pages.

        Chunks are in the mask of transformers' attention, which is never built here, and not in its
        arguments; budgets are in neither. A module that several layers share does not have its
        layer's index: it is the next one.
        """
        if self._attended == len(self._specs):
            raise RuntimeError(f"layer {call.layer} attends after the last one")
        spec: LayerSpec = self._specs[self._attended]
        window_tokens = spec.window_tokens if spec.kind is GroupKind.SLIDING else 0
        in_turn = call.layer in (spec.index, hook.SHARED_MODULE)
        if not in_turn or call.params.window_tokens != window_tokens:
            raise RuntimeError(
                f"layer {call.layer} attends with window {call.params.window_tokens}, "
                f"expected layer {spec.index} with window {window_tokens}"
            )
        self._attended += 1
        return spec


def _stored(vectors: torch.Tensor, pages: LayerPages) -> torch.Tensor:
    """Convert keys or values to the kernels' form; kernels quantise by themselves."""
    return vectors if pages.quantised else vectors.to(pages.dtype)
