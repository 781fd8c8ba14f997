"""A step computed by transformers' own modules: their attention reads and writes pages.

No mask is built and no transformers cache exists: each layer writes the step's keys and values
into the pages of its group and attends over them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.models.config.activations import activation_model
from kvell.models.config.description import ModelDescription
from kvell.models.families.families import MIXER_KINDS, WITH_IMAGES
from kvell.models.forward import hook
from kvell.models.forward.forward_batch import ForwardBatch, ModelMemory
from kvell.models.forward.hook import PagedStep, hook_layers
from kvell.models.forward.image_side import ImageSide, text_attention
from kvell.models.forward.latents import place_latents
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.forward.true_positions import RopeTables, TruePositions, asks_a_cache
from kvell.models.images.image_store import ImageStore
from kvell.models.partials.remote_sections import RemoteSections
from kvell.models.partials.served_layers import ServedLayer, ServedLayers
from kvell.models.states.mixer_slots import StatePass, during, place_mixers
from kvell.pages.layout import GroupKind, Layout


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


class ModulePass:
    """A transformers causal LM whose attention and states run over pages.

    :ivar latent_sizes: by layer that stores latents: the size of a key's part that is its value.
    :ivar head_input: the head's input in the last step that requested it.
    :ivar activations: estimate, from the config, of a step's memory besides weights and pages.
    :ivar elsewhere: the creditors of remote sections; None: there are none.
    :ivar served_layers: the pages of layers that use the attention hook, once they are attached;
        None: no service reads them as the kernels do.
    """

    def __init__(
        self, module: Any, description: ModelDescription, kernels: AttentionKernels
    ) -> None:
        has_images = type(module).__name__ in WITH_IMAGES
        text_attention(module, has_images)
        self._module, self._description, self._kernels = module, description, kernels
        self._mixers = place_mixers(module, description, MIXER_KINDS)
        self._asks_a_cache = asks_a_cache(module)
        self._rope_tables = RopeTables(module)
        self._image_side = ImageSide(module, description, kernels) if has_images else None
        self._memory: ModelMemory | None = None
        self.head_input = HeadInput(module)
        self.latent_sizes = place_latents(module, description)
        self.activations = activation_model(module.config)
        self.served_layers: ServedLayers | None = None
        self.elsewhere: RemoteSections | None = None

    @property
    def images(self) -> ImageStore | None:
        return self._image_side.store if self._image_side else None

    def attach(self, layout: Layout, pool: torch.Tensor, memory: ModelMemory) -> None:
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
        assert self._memory is not None, "attach memory first"
        step = PagedStep(self._memory, self._description, self._kernels, batch, callbacks)
        if self.elsewhere is not None and self.served_layers is not None:
            num_tokens = len(batch.token_ids)
            step.queries = self.elsewhere.layer_queries(
                self.served_layers, batch.groups, num_tokens
            )
        states = StatePass(self._memory.states, batch.groups)
        with (
            during(self._mixers, states),
            self.head_input.recording(batch.wants_hidden),
            self._rope_tables.of_step(batch.long_rope),
        ):
            logits = self._run(batch, step)
        step.require_complete()
        states.require_complete()
        step.dropping.move()
        return logits.float()

    def _run(self, batch: ForwardBatch, step: PagedStep) -> torch.Tensor:
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
