"""Shapes and memory for benches without a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvell.cli.terminal.files import named_config
from kvell.memory import GroupKind, Layout, Manager, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import ModelDescription, describe
from kvell.vocabulary import GIB

ELEMENT_BYTES = 2
PLANNED_BYTES = 64 * GIB
"""Pool for which page sizes are chosen where the pool's size does not matter."""
ATTENTION_SHAPES = ("llama3-8b", "gemma3-27b", "ministral-8b", "gpt-oss-20b", "llama4-scout")
STATE_SHAPES = ("jamba-mini", "qwen3-next", "nemotron-h-8b")
SHAPES = (*ATTENTION_SHAPES, *STATE_SHAPES)
"""The shapes that are compared with vLLM 0.32's manager."""


@dataclass(frozen=True)
class Shape:
    """A named config and its description."""

    name: str
    config: Any
    description: ModelDescription

    @property
    def images_in_text(self) -> bool:
        """Whether an image's tokens are text tokens."""
        return all(layer.kind is not GroupKind.CROSS for layer in self.description.layers)


def read_shape(name: str) -> Shape:
    """Read a shape of ``bench/configs``."""
    config = read_config(Path(named_config(name)))
    return Shape(name, config, describe(config, ELEMENT_BYTES))


def layout_of(shape: Shape, pool_bytes: int, manager: Manager = "kvell") -> Layout:
    """Return a layout with page sizes as for :data:`PLANNED_BYTES` and pages that fill the pool."""
    layout = plan_layout(shape.description.layers, PLANNED_BYTES, manager=manager)
    return replace(layout, num_large_pages=pool_bytes // layout.large_page_bytes)
