"""The parts of one memory core: pool, index and placer over one set of groups."""

from collections.abc import Sequence
from dataclasses import replace

from kvell.pages.layout import GroupSpec, Layout
from kvell.pages.pool import PagePool
from kvell.prefix.eviction.checkpoints import Usefulness
from kvell.prefix.eviction.evictor import EvictionRule, Evictor
from kvell.prefix.groups.policies import policy_of
from kvell.prefix.index.changes import IndexChanges
from kvell.prefix.index.radix import RadixTree
from kvell.prefix.placement.placement import Placer


class Store:
    """The parts that :class:`ReferenceCore` and its helpers share."""

    def __init__(self, layout: Layout, rule: EvictionRule) -> None:
        self.layout = layout
        self.rule = rule
        self.usefulness = Usefulness()
        self.policies = tuple(policy_of(group) for group in layout.groups)
        self.evictor = Evictor(len(layout.groups), rule)
        self.pool = PagePool(layout, self.evictor)
        self.evictor.watch(self.pool)
        self.tree = RadixTree(len(layout.groups))
        self.changes = IndexChanges()
        self.placer = Placer(self.pool, self.evictor, self.tree, self.changes, self.usefulness)

    @property
    def step(self) -> int:
        """The current step number."""
        return self.evictor.now

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Every group of the pool."""
        return self.layout.groups

    def own(self, model: str) -> tuple[int, ...]:
        """Return the indices of a model's groups.

        :raises ValueError: if there are none.
        """
        indices = tuple(index for index, group in enumerate(self.groups) if group.model == model)
        if not indices:
            raise ValueError(f"no group of the pool belongs to model {model!r}")
        return indices

    def register(self, groups: Sequence[GroupSpec]) -> None:
        """Serve more groups; see :meth:`MemoryCore.register`."""
        check_new_groups(self.layout, groups)
        self.layout = replace(self.layout, groups=(*self.groups, *groups))
        self.policies = tuple(policy_of(group) for group in self.groups)
        self.evictor.add_groups(len(groups))
        self.pool.add_groups(self.layout)
        self.tree.add_groups(len(groups))
        self.placer.add_groups(len(groups))


def check_new_groups(layout: Layout, groups: Sequence[GroupSpec]) -> None:
    """Raise ValueError if a pool of this layout cannot also serve these groups."""
    models = {group.model for group in layout.groups}
    if layout.quota_large_pages is not None:
        raise ValueError("the pool was cut into shares at start: there is none to give")
    for group in groups:
        if group.model in models:
            raise ValueError(f"model {group.model!r} is in the pool already")
        if group.page_stride_bytes * group.pages_per_large != layout.large_page_bytes:
            raise ValueError(f"pages of group {group.name!r} do not divide the large page")
