"""Shapes and memory for replays without a model, shared by all replay benches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvell.cli.replay.command import named_config, replay_limits
from kvell.clock import MonotonicClock
from kvell.memory import Eviction, GroupKind, Layout, Manager, create_core, plan_layout
from kvell.models.config.configs import read_config
from kvell.models.config.description import ModelDescription, describe
from kvell.simulator.hardware.model_cost import model_cost
from kvell.simulator.hardware.profiles import DEFAULT_HARDWARE, load_profile
from kvell.simulator.replay.replay import Replay
from kvell.simulator.replay.runner import Machine
from kvell.simulator.traces.rows import TraceRow
from kvell.vocabulary import GIB

ELEMENT_BYTES = 2
PLANNED_BYTES = 64 * GIB
"""Pool for which page sizes are chosen where the pool's size does not matter."""
AMPLE_BYTES = 4096 * GIB

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
    def has_states(self) -> bool:
        """Whether any layer keeps a state."""
        return any(layer.kind is GroupKind.STATE for layer in self.description.layers)

    @property
    def images_in_text(self) -> bool:
        """Whether an image's tokens are text tokens."""
        return all(layer.kind is not GroupKind.CROSS for layer in self.description.layers)


def read_shape(name: str) -> Shape:
    """A shape of ``bench/configs``."""
    config = read_config(Path(named_config(name)))
    return Shape(name, config, describe(config, ELEMENT_BYTES))


def layout_of(shape: Shape, pool_bytes: int, manager: Manager = "kvell") -> Layout:
    """A layout with page sizes as for :data:`PLANNED_BYTES` and pages that fill the pool."""
    layout = plan_layout(shape.description.layers, PLANNED_BYTES, manager=manager)
    return replace(layout, num_large_pages=pool_bytes // layout.large_page_bytes)


def replay_of(
    shape: Shape,
    layout: Layout,
    rows: Sequence[TraceRow],
    *,
    eviction: Eviction = "lru",
) -> Replay:
    """A replay, not begun, of rows that all wait at the start."""
    machine = Machine(
        load_profile(DEFAULT_HARDWARE), model_cost(shape.config, shape.description, ELEMENT_BYTES)
    )
    return Replay(
        create_core(layout, eviction=eviction),
        shape.description.layers,
        replay_limits(layout, shape.description.max_model_len),
        rows,
        "start",
        machine,
        MonotonicClock(),
        images_in_text=shape.images_in_text,
    )


def replayed(
    shape: Shape,
    layout: Layout,
    rows: Sequence[TraceRow],
    *,
    eviction: Eviction = "lru",
) -> tuple[dict[str, Any], Replay]:
    """The report of :func:`replay_of`, and the run itself."""
    run = replay_of(shape, layout, rows, eviction=eviction)
    run.run()
    return run.report(), run
