"""Kvell's memory core as a library: no torch, no server, typed.

Requests of several layer groups share one pool of large pages; computed prefixes are
cached and found again.  One call per step serves a whole batch::

    import numpy as np
    from kvell.memory import GroupKind, LayerSpec, create_core, plan_layout, register

    layers = [
        LayerSpec(0, GroupKind.FULL, kv_heads=1, head_size=64, element_bytes=2),
        LayerSpec(1, GroupKind.SLIDING, 1, 64, 2, window_tokens=128),
    ]
    core = create_core(plan_layout(layers, kv_memory_bytes=1 << 20))

    core.begin_step(1)
    prompt = np.arange(40, dtype=np.int32)
    request = core.open(prompt, root="")            # nothing is cached yet
    core.claim(request, expected_tokens=48)
    handles, until = np.asarray([request], np.int32), np.asarray([40], np.int32)
    served, new_pages = core.grow(handles, until)   # rows: 0, group, position, page
    core.advance(handles, until)                    # after the step was computed
    assert served == 1 and len(new_pages) == 6      # 40 tokens: 3 pages in each group
    assert core.peek(prompt, root="") == 32         # another request would hit two pages
    core.close(request)

    state = LayerSpec(0, GroupKind.STATE, 0, 0, 2, state_bytes=4096)
    assert [g.name for g in register(core, "small", [state])] == ["small:state"]
    other = core.open(prompt, root="", model="small")
    core.close(other)

``docs/memory-library.md`` describes the protocol of a step, images, states and several models.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from kvell.errors import ChangeSomething
from kvell.pages.audit import audit
from kvell.pages.grouping import Embeddings
from kvell.pages.layout import IMAGE_KINDS, GroupKind, GroupSpec, LayerSpec, Layout, as_draft
from kvell.pages.registering import MAX_REGISTERED_PADDING, plan_groups_into
from kvell.pages.sizing import MANAGERS, Manager, plan_layout
from kvell.pages.snapshot import HolderSnapshot, IndexEntry, PoolSnapshot, PoolTotals
from kvell.prefix.core.compiled import CompiledCore
from kvell.prefix.eviction.hazard import HazardRule, capacity_tokens
from kvell.prefix.groups.capacity import (
    fits_alone,
    large_pages_needed,
    longest_request,
    pages_of_text,
    pool_bytes_for,
    request_bytes,
    requests_that_fit,
)
from kvell.prefix.groups.facts import Facts, Images, ImageSpan, facts_of
from kvell.prefix.groups.needs import alignment_tokens
from kvell.prefix.groups.policies import GroupPolicy, policy_of
from kvell.prefix.interface import (
    DROPPED,
    MOVED,
    NAMED,
    HoldingCore,
    Ints,
    MemoryCore,
    VisibleCore,
    WithholdingCore,
)
from kvell.prefix.tokens import Tokens, common_prefix

__all__ = [
    "DROPPED",
    "EVICTIONS",
    "IMAGE_KINDS",
    "MANAGERS",
    "MAX_REGISTERED_PADDING",
    "MOVED",
    "NAMED",
    "Embeddings",
    "Eviction",
    "Facts",
    "GroupKind",
    "GroupPolicy",
    "GroupSpec",
    "HolderSnapshot",
    "HoldingCore",
    "ImageSpan",
    "Images",
    "IndexEntry",
    "Ints",
    "LayerSpec",
    "Layout",
    "Manager",
    "MemoryCore",
    "PoolSnapshot",
    "PoolTotals",
    "Tokens",
    "VisibleCore",
    "WithholdingCore",
    "alignment_tokens",
    "as_draft",
    "audit",
    "common_prefix",
    "create_core",
    "facts_of",
    "fits_alone",
    "large_pages_needed",
    "longest_request",
    "pages_of_text",
    "plan_groups_into",
    "plan_layout",
    "policy_of",
    "pool_bytes_for",
    "register",
    "request_bytes",
    "requests_that_fit",
]

Eviction = Literal["lru", "hazard"]
"""Least recently used first, or by the learned chance that a prefix is used again."""
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
"""All rules of eviction."""


def create_core(layout: Layout, eviction: Eviction = "lru") -> VisibleCore:
    """Return a memory core over an empty pool.

    :raises ChangeSomething: for an unknown rule of eviction.
    """
    if eviction not in EVICTIONS:
        raise ChangeSomething("eviction", eviction, "is not a rule", "use lru or hazard")
    rule = HazardRule(capacity_tokens(layout)) if eviction == "hazard" else None
    return CompiledCore(layout, rule)


def register(core: MemoryCore, model: str, layers: Sequence[LayerSpec]) -> tuple[GroupSpec, ...]:
    """Serve a further model from the pool of a live core; return the model's groups.

    The large page keeps its size: pages of the new groups divide it with at most 5 % of padding, by
    a choice of the tokens of a page or the layers of a state's page. Requests name the model when
    they are opened; open requests and cached prefixes stay as they are.

    :param core: its requests may be open.
    :param model: a name that no group of the pool has; it replaces the layers' own.
    :raises ChangeSomething: if no page divides the large page that well (the remedy names the size
        that would fit both, for ``plan_layout`` at the next start), if the name is taken, or if the
        pool was cut into fixed shares at start. The core is unchanged.
    """
    layout = core.layout
    if any(group.model == model for group in layout.groups):
        raise ChangeSomething("model", model or "''", "is in the pool already", "use another name")
    if layout.quota_large_pages is not None:
        raise ChangeSomething(
            "manager", "a pool cut at start", "has no memory to share", "use manager kvell"
        )
    named = [replace(layer, model=model) for layer in layers]
    groups = plan_groups_into(layout.large_page_bytes, named, beside=layout.groups)
    core.register(groups)
    return groups
