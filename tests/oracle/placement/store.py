"""The parts of one memory core: pool, index and placer over one set of groups."""

from collections.abc import Sequence
from dataclasses import replace

from kvell.pages.layout import GroupSpec, Layout
from kvell.prefix.core.compiled import check_new_groups
from kvell.prefix.groups.policies import policy_of
from tests.oracle.eviction.checkpoints import Usefulness
from tests.oracle.eviction.evictor import EvictionRule, Evictor
from tests.oracle.index.changes import IndexChanges
from tests.oracle.index.radix import RadixTree
from tests.oracle.pages.pool import PagePool
from tests.oracle.placement.placement import Placer


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
        return self.evictor.now

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
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
        check_new_groups(self.layout, groups)
        self.layout = replace(self.layout, groups=(*self.groups, *groups))
        self.policies = tuple(policy_of(group) for group in self.groups)
        self.evictor.add_groups(len(groups))
        self.pool.add_groups(self.layout)
        self.tree.add_groups(len(groups))
        self.placer.add_groups(len(groups))
