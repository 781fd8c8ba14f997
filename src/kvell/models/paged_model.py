"""A causal LM over paged memory, run by a compiled pass or by transformers' own modules.

A step's requests are flattened to one row of tokens with their own positions.
"""

from typing import TYPE_CHECKING, Any

import torch

from kvell.attention.interface import AttentionKernels
from kvell.elastic.arena import ActivationNeed
from kvell.models.captured.graphs import Graphs
from kvell.models.captured.passes import SlotStep, StepRecords
from kvell.models.captured.slots import SlotLimits
from kvell.models.config.config_fields import text_config
from kvell.models.config.description import ModelDescription
from kvell.models.config.state_sizes import state_shapes
from kvell.models.forward.forward_batch import ForwardBatch, ModelMemory
from kvell.models.forward.kv_memory import layer_pages, storing_layer
from kvell.models.forward.segments import LayerCallbacks
from kvell.models.fused.decoder import FusedDecoder, PassRecord
from kvell.models.images.image_store import ImageStore
from kvell.models.partials.remote_sections import RemoteSections
from kvell.models.partials.served_layers import ServedLayers
from kvell.models.states.state_memory import StateMemory, state_memory
from kvell.pages.layout import IMAGE_KINDS, GroupKind, Layout

if TYPE_CHECKING:
    from kvell.models.forward.module_pass import ModulePass

__all__ = ["ForwardBatch", "PagedModel"]


class PagedModel:
    """A causal LM that runs steps; it sees requests only as rows of a batch.

    Not for concurrent use: one forward pass at a time.

    :ivar stored_as: a line about files of quantised weights; "" for plain ones.
    :ivar captured: records of decode steps (:meth:`capture`); None: every step runs its Python.
    """

    def __init__(
        self,
        module: Any,
        description: ModelDescription,
        kernels: AttentionKernels,
        kv_dtype: torch.dtype | None = None,
        fused: FusedDecoder | None = None,
        *,
        has_head: bool = True,
        quantization: str = "none",
    ) -> None:
        """Take over a transformers causal LM (its attention implementation is set here).

        :param description: describes the module's config, with the sizes of ``kv_dtype``.
        :param kv_dtype: dtype of stored keys and values; the module's own if not given.
        :param fused: a compiled pass that has taken over the module's weights and computes
            every step instead of it.
        :param has_head: whether the model has a head of its own to write text with.
        """
        self.module = module.eval()
        self.description = description
        self.kernels = kernels
        self.kv_dtype = kv_dtype or self.dtype
        self.fused = fused
        self.has_head = has_head
        self.quantization = quantization
        self.stored_as = ""
        self.captured: StepRecords | None = None
        self._modules = None if fused else _module_pass(self.module, description, kernels)
        self._memory: ModelMemory | None = None
        self._last: ForwardBatch | None = None  # the last one that a compiled pass computed

    @property
    def device(self) -> torch.device:
        return torch.device(self.module.device)

    @property
    def dtype(self) -> torch.dtype:
        return torch.empty(0, dtype=self.module.dtype).dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers; tied ones count once."""
        tensors = {t.data_ptr(): t.nbytes for t in self.module.state_dict().values()}
        packed_bytes = self.fused.weight_bytes if self.fused else 0
        return sum(int(size) for size in tensors.values()) + packed_bytes

    @property
    def activations(self) -> ActivationNeed:
        """Memory that a step needs besides weights and pages.

        Exact for a compiled pass, otherwise an estimate from the config.
        """
        return self._modules.activations if self._modules else self._fused.buffers

    @property
    def passed(self) -> PassRecord | None:
        return self.fused.passed if self.fused else None

    @property
    def images(self) -> ImageStore | None:
        return self._modules.images if self._modules else None

    @property
    def served_layers(self) -> ServedLayers | None:
        """The layers with which a creditor answers queries for this model, once memory is attached.

        None: its kernels are not those of the service, so it neither answers nor asks.
        """
        return self._pass.served_layers

    @property
    def elsewhere(self) -> RemoteSections | None:
        """The creditors of remote sections, which the passes ask; None: there are none."""
        return self._pass.elsewhere

    @elsewhere.setter
    def elsewhere(self, remote: RemoteSections | None) -> None:
        self._pass.elsewhere = remote

    def attach(self, layout: Layout, pool: torch.Tensor) -> None:
        """Set the memory of K and V; call before the first step, and again to move them.

        :param pool: uint8 [≥ layout.pool_bytes] on the model's device.
        :raises ValueError: if layout, description and pool do not match.
        """
        latent_sizes = self._modules.latent_sizes if self._modules else {}
        pages = layer_pages(layout, self.description, pool, self.kv_dtype, latent_sizes)
        groups = {
            layer.index: layout.group_of_layer(storing_layer(layer))
            for layer in self.description.layers
            if layer.index in pages and layer.kind is not GroupKind.STATE
        }
        memory = ModelMemory(pages, groups, self._state_memory(layout, pool))
        if self._modules:
            self._modules.attach(layout, pool, memory)
        else:
            self._fused.attach(pages, groups, memory.states)
        self._memory = memory

    def _state_memory(self, layout: Layout, pool: torch.Tensor) -> StateMemory:
        layers = [x.index for x in self.description.layers if x.kind is GroupKind.STATE]
        if not layers:
            return StateMemory({}, {})
        shapes = state_shapes(text_config(self.module.config), self.description.architecture)
        return state_memory(layout, dict.fromkeys(layers, shapes), pool, self.dtype)

    def capture(
        self,
        graphs: Graphs,
        layout: Layout,
        pool: torch.Tensor,
        limits: SlotLimits,
        seats: int,
    ) -> None:
        """Record decode steps from now on, over attached memory.

        :param pool: with a large page behind the layout's, if the model has states.
        :param seats: requests whose last token stays on the device.
        """
        groups = [None if group.kind in IMAGE_KINDS else group for group in layout.groups]
        self.captured = StepRecords(
            self._computed, groups, graphs, pool, layout.pool_bytes, limits, self.kernels, seats
        )

    def forward(
        self, batch: ForwardBatch | SlotStep, callbacks: LayerCallbacks | None = None
    ) -> torch.Tensor:
        """Compute a step and return logits, float32 [rows, vocab].

        Those of a recorded step stand until the next one.

        :raises RuntimeError: if no memory is attached, or if the model's code did not
            call attention exactly once per layer, with the description's window.
        """
        if self._memory is None:
            raise RuntimeError("attach() memory before the first forward pass")
        if isinstance(batch, SlotStep):
            if self.captured is None or callbacks is not None:
                raise RuntimeError("a recorded step calls nothing back, and needs its record")
            return self.captured.launch(batch)
        if self.captured is not None:
            self.captured.graphs.follow()
        return self._computed(batch, callbacks)

    def _computed(
        self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None
    ) -> torch.Tensor:
        if self._modules:
            if batch.begun is not None:
                batch.begun()
            return self._modules.forward(batch, callbacks)
        self._last = batch
        return self._fused.forward(batch, callbacks)

    def largest(self, batch: ForwardBatch | SlotStep) -> list[int] | None:
        """Return the index of each row's largest logit, the first of equal ones.

        None if modules computed the step, if it was recorded, or ``batch`` is not the last one or
        did not set ``wants_largest``.
        """
        if isinstance(batch, SlotStep) or self._last is not batch or not batch.wants_largest:
            return None
        return self._fused.largest

    def hidden(self, batch: ForwardBatch | SlotStep) -> torch.Tensor:
        """Return the head's input of each row: the final norm's output, float32 [rows, hidden].

        :param batch: the last one, which set ``wants_hidden``.
        """
        if isinstance(batch, SlotStep) or not batch.wants_hidden:
            raise ValueError("the step was not asked to keep what its head reads")
        return self._modules.head_input.rows() if self._modules else self._fused.hidden().float()

    @property
    def _pass(self) -> "FusedDecoder | ModulePass":
        return self._modules or self._fused

    @property
    def _fused(self) -> FusedDecoder:
        assert self.fused is not None, "either modules compute or a compiled pass does"
        return self.fused


def _module_pass(
    module: Any, description: ModelDescription, kernels: AttentionKernels
) -> "ModulePass":
    # Imported here: transformers' modelling code takes seconds to import.
    from kvell.models.forward.module_pass import ModulePass

    return ModulePass(module, description, kernels)
