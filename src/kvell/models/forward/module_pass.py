"""A step computed by transformers' own modules: their attention reads and writes pages.

No mask is built and no transformers cache exists: each layer writes the step's keys and values
into the pages of its group and attends over them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels, GroupBatch, LayerPages
from kvell.models.config.activations import activation_model
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import MIXER_KINDS, WITH_IMAGES
from kvell.models.forward import hook
from kvell.models.forward.both_directions import BothDirections
from kvell.models.forward.dropping import TokenDropping
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
