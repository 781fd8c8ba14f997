"""A transformers causal LM whose attention reads and writes paged memory.

A step's requests are flattened to one row of tokens with their own positions;
no mask is built and no transformers cache exists: each layer writes the step's
keys and values into the pages of its group and attends over them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kvell.attention.interface import AttentionKernels, GroupBatch, LayerPages
from kvell.models import hook
from kvell.models.description import ModelDescription
from kvell.models.kv_memory import layer_pages
from kvell.models.segments import LayerCallbacks
from kvell.pages.layout import LayerSpec, Layout


@dataclass(frozen=True)
class ForwardBatch:
    """One step's work over a ragged batch of n requests with T new tokens in all.

    All tensors are on the model's device.

    :param token_ids: int64 [T], request after request.
    :param positions: int64 [T], each token's position in its own request.
    :param groups: metadata of each layer group, in the order of the layout.
    :param logits_rows: int64 [rows], the tokens whose logits are wanted; may be empty.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupBatch, ...]
    logits_rows: torch.Tensor


@dataclass(frozen=True)
class _Memory:
    """Where every layer finds its pages and which group's metadata is its own."""

    pages: tuple[LayerPages, ...]
    group_of_layer: tuple[int, ...]


class PagedModel:
    """Runs steps; knows nothing of requests beyond the rows of a batch.

    Not for concurrent use: one forward pass at a time.
    """

    def __init__(
        self, module: Any, description: ModelDescription, kernels: AttentionKernels
    ) -> None:
        """Take over a transformers causal LM (its attention implementation is set here)."""
        hook.install()
        module.set_attn_implementation(hook.HOOK_NAME)
        self.module = module.eval()
        self.description = description
        self.kernels = kernels
        self._memory: _Memory | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(self.module.device)

    @property
    def dtype(self) -> torch.dtype:
        """What the weights and activations are stored in."""
        return torch.empty(0, dtype=self.module.dtype).dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers; tied ones count once."""
        tensors = {t.data_ptr(): t.nbytes for t in self.module.state_dict().values()}
        return sum(tensors.values())

    def attach(
        self, layout: Layout, pool: torch.Tensor, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Say where K and V are kept, before the first step; may be called again.

        :param pool: uint8 [≥ layout.pool_bytes] on the model's device.
        :param kv_dtype: of stored keys and values; the model's own if not given.
        :raises ValueError: if layout, description and pool do not fit each other.
        """
        layers = [layer.index for layer in self.description.layers]
        self._memory = _Memory(
            layer_pages(layout, self.description, pool, kv_dtype or self.dtype),
            tuple(layout.group_of_layer(index) for index in layers),
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, callbacks: LayerCallbacks | None = None) -> torch.Tensor:
        """Compute a step; returns logits, float32 [rows, vocab].

        :raises RuntimeError: if no memory is attached, or if the model's code did not
            call attention exactly once per layer, with the window the description says.
        """
        if self._memory is None:
            raise RuntimeError("attach() memory before the first forward pass")
        step = _PagedStep(self._memory, self.description, self.kernels, batch.groups, callbacks)
        output = self.module(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            **{hook.STEP_ARGUMENT: step},
        )
        step.require_complete()
        logits: torch.Tensor = output.logits
        return logits[0].float()


class _PagedStep:
    """One forward pass: hands each layer its pages and its group's metadata."""

    def __init__(
        self,
        memory: _Memory,
        description: ModelDescription,
        kernels: AttentionKernels,
        groups: tuple[GroupBatch, ...],
        callbacks: LayerCallbacks | None,
    ) -> None:
        self._memory = memory
        self._specs = description.layers
        self._kernels = kernels
        self._groups = groups
        self._callbacks = callbacks
        self._attended = 0

    def attend(self, call: hook.LayerCall) -> torch.Tensor:
        """Write the new keys and values, then attend (hook.Step)."""
        self._expect(call)
        pages = self._memory.pages[call.layer]
        group = self._groups[self._memory.group_of_layer[call.layer]]
        callbacks = self._callbacks
        key, value = call.key.to(pages.dtype), call.value.to(pages.dtype)
        self._kernels.write_kv(pages, group, key, value)
        if callbacks is None:
            return self._kernels.attend(pages, group, call.query, call.params)
        callbacks.after_kv_write(call.layer)
        callbacks.before_attend(call.layer, call.query)
        output = self._kernels.attend(pages, group, call.query, call.params)
        callbacks.after_attend(call.layer, output)
        return output

    def require_complete(self) -> None:
        """Every layer attended, or the model has a mixer that the hook never saw."""
        if self._attended != len(self._specs):
            raise RuntimeError(f"{self._attended} of {len(self._specs)} layers attended over pages")

    def _expect(self, call: hook.LayerCall) -> None:
        """Layers come in order, each once, with the window that its pages are kept for."""
        spec: LayerSpec = self._specs[call.layer]
        if call.layer != self._attended or call.params.window_tokens != spec.window_tokens:
            raise RuntimeError(
                f"layer {call.layer} attends with window {call.params.window_tokens}, "
                f"expected layer {self._attended} with window {spec.window_tokens}"
            )
        self._attended += 1
