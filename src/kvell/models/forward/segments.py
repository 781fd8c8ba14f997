"""The seams of a forward pass: per layer pre, attend, post.

``pre`` (norm, projections, rope) and ``post`` (output projection, MLP) are the model's own code;
the KV write and the attention between them are ours. Code that streams pages out, transfers by
layer or computes attention remotely hooks in here.
"""

from typing import Protocol

import torch


class LayerCallbacks(Protocol):
    """Callbacks at the seams of every layer, in the order of the methods below.

    ``layer`` is the layer's index in the model. Tensors are [T, heads, head_size] in the model's
    dtype, owned by the step: read them immediately or copy them.
    """

    def after_kv_write(self, layer: int) -> None:
        """Handle that the step's K and V of this layer are in their pages."""
        ...

    def before_attend(self, layer: int, query: torch.Tensor) -> None:
        """Handle that the query is computed; local attention is next."""
        ...

    def after_attend(self, layer: int, output: torch.Tensor) -> None:
        """Handle that local attention is done."""
        ...
