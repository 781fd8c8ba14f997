"""The state groups of one model, and the pages of its layers' states."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvell.models.config.state_sizes import StateShapes
from kvell.models.states.state_pages import StatePages, state_pages
from kvell.pages.layout import GroupKind, Layout


@dataclass(frozen=True)
class StateMemory:
    """Per layer with a state, in order: its pages and the index of its group."""

    pages: dict[int, StatePages]
    groups: dict[int, int]


def state_memory(
    layout: Layout, shapes: Mapping[int, StateShapes], pool: torch.Tensor, dtype: torch.dtype
) -> StateMemory:
    """Locate every layer's states in the pool.

    :param shapes: states of each layer that has any, in order.
    :raises ValueError: if a layer has no group, or its states do not have the group's size.
    """
    groups = {layer: layout.group_of_layer(layer, GroupKind.STATE) for layer in shapes}
    pages = {
        layer: state_pages(layout.groups[groups[layer]], layer, kept, pool, dtype)
        for layer, kept in shapes.items()
    }
    return StateMemory(pages, groups)
