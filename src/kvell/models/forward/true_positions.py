"""True positions for transformers' code that treats a step's row of tokens as one text.

A flattened step has no cache, but every token has its position. Llama 4 reads it from a cache, to
scale its queries. Rotations that depend on a text's length use the largest position as that length:
LongRoPE's two tables, and dynamic scaling.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Rotation = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
"""Function to cosines and sines of a layer type's positions, or both as complex numbers."""
_ASKING = "attn_temperature_tuning"


def asks_a_cache(module: torch.nn.Module) -> bool:
    return any(getattr(child, _ASKING, False) for child in module.modules())


class TruePositions:
    """Stand-in for a cache that stores nothing and only reports positions.

    :param positions: int64 [T], each token's position in its own request.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)
        self._before = positions - rows

    def get_seq_length(self, _layer: int = 0) -> torch.Tensor:
        """Return int64 [T]: the difference between each row's position and its index."""
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's own keys and values; earlier ones are in pages."""
        return key, value


class RopeTables:
    """The rotations of a model that depend on the length of a text, for each text its own.

    Dynamic scaling changes nothing up to the length that the model was made for, and no text is
    longer, so its first frequencies hold.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._is_long: torch.Tensor | None = None
        for rotary in [child for child in module.modules() if hasattr(child, "rope_type")]:
            self._fix(rotary)

    @contextmanager
    def of_step(self, is_long: torch.Tensor | None) -> Iterator[None]:
        """Rotate by the tables of a step's texts.

        :param is_long: bool [T], tokens of texts under the long table; None: there are none.
        """
        self._is_long = is_long
        try:
            yield
        finally:
            self._is_long = None

    def _fix(self, rotary: Any) -> None:
        """Keep a rotation's frequencies from following the row's largest position."""
        kinds = rotary.rope_type
        by_type = kinds if isinstance(kinds, dict) else {None: kinds}
        fixed = {
            layer: "default" if _follows_length(kind) else kind for layer, kind in by_type.items()
        }
        long_frequencies = {
            _frequencies_of(layer): _long_frequencies(rotary, layer)
            for layer, kind in by_type.items()
            if kind == "longrope"
        }
        rotary.rope_type = fixed if isinstance(kinds, dict) else fixed[None]
        if long_frequencies:
            rotary.forward = self._by_text(rotary, rotary.forward, long_frequencies)

    def _by_text(
        self,
        rotary: torch.nn.Module,
        short: Rotation,
        long_frequencies: dict[str, torch.Tensor],
    ) -> Rotation:
        """Return a rotation's forward pass that gives each token the table of its text."""

        def forward(
            x: torch.Tensor, position_ids: torch.Tensor, **kwargs: str
        ) -> torch.Tensor | tuple[torch.Tensor, ...]:
            below = short(x, position_ids, **kwargs)
            is_long = self._is_long
            if is_long is None:
                return below
            own = {name: getattr(rotary, name) for name in long_frequencies}
            for name, frequencies in long_frequencies.items():
                setattr(rotary, name, frequencies.to(own[name].device))
            try:
                above = short(x, position_ids, **kwargs)
            finally:
                for name, frequencies in own.items():
                    setattr(rotary, name, frequencies)
            if isinstance(below, torch.Tensor) and isinstance(above, torch.Tensor):
                return torch.where(is_long[:, None], above, below)
            return tuple(
                torch.where(is_long[:, None], a, b) for a, b in zip(above, below, strict=True)
            )

        return forward


def _follows_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _frequencies_of(layer_type: str | None) -> str:
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def _long_frequencies(rotary: Any, layer_type: str | None) -> torch.Tensor:
    ropes = rotary.config.rope_parameters
    original = (ropes if layer_type is None else ropes[layer_type])[
        "original_max_position_embeddings"
    ]
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](
        rotary.config,
        getattr(rotary, _frequencies_of(layer_type)).device,
        seq_len=original + 1,
        layer_type=layer_type,
    )[0]
    return frequencies
