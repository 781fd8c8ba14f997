"""Records of decode steps: the sizes of their memory, from the engine's limits."""

from collections.abc import Mapping

import torch

from kvell.engine.requests.limits import Limits
from kvell.memory import GroupSpec, Layout
from kvell.models.captured.graphs import Graphs
from kvell.models.captured.slots import SlotLimits
from kvell.models.paged_model import PagedModel


def record(
    graphs: Graphs,
    models: Mapping[str, PagedModel],
    layout: Layout,
    pool: torch.Tensor,
    limits: Limits,
) -> None:
    """Let models record their decode steps.

    :param models: by name, without a draft model.
    :param pool: with a large page behind the layout's.
    """
    for name, model in models.items():
        own = layout.seen_by(name)
        pages = sum(_most_entries(group, layout, limits) for group in own.groups)
        tokens = max(group.page_tokens * _num_pages(group, layout) for group in own.groups)
        within = SlotLimits(limits.max_num_seqs, pages, limits.max_model_len, tokens)
        model.capture(graphs, own, pool, within, _num_seats(limits))


def _num_seats(limits: Limits) -> int:
    return 2 * limits.max_num_seqs


def _most_entries(group: GroupSpec, layout: Layout, limits: Limits) -> int:
    """Return the entries of a group's page tables in a recorded step.

    Requests may share every page: twice the pool's pages is enough for most steps.
    """
    of_request = -(-limits.max_model_len // max(1, group.page_tokens))
    return min(limits.max_num_seqs * of_request, 2 * _num_pages(group, layout))


def _num_pages(group: GroupSpec, layout: Layout) -> int:
    return group.pages_per_large * layout.num_large_pages
