"""The prefixes that instances cache, by their notices: a prompt tree for each role.

Source: MemServe §6, global prompt trees.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvell.cluster.trees.chains import HashMemo, PromptChain, TreeGroup
from kvell.cluster.trees.tree import PromptTree
from kvell.engine.protocol.notices import IndexedGroup, IndexNotice
from kvell.engine.requests.cache_roots import long_root

BY_LOCALITY = ("longest-prefix", "prompt-tree")
"""Routing policies that read what instances cache."""


class PrefixDirectory:
    """The prompt trees of a front; pure.

    Instances of one role have equal layouts; those of different roles may cache different prefixes.
    """

    def __init__(self) -> None:
        self._trees: dict[str, PromptTree] = {}
        self._roles: dict[str, str] = {}
        self._groups: tuple[TreeGroup, ...] = ()
        self._memo = HashMemo()

    def on_joined(self, instance_id: str, role: str, indexed: Sequence[IndexedGroup]) -> None:
        self._groups = self._groups or tuple(map(TreeGroup.of, indexed))
        self._roles[instance_id] = role
        if role not in self._trees:
            self._trees[role] = PromptTree(self._groups)

    def on_notice(
        self, instance_id: str, incarnation: int, notice: IndexNotice, now_seconds: float
    ) -> bool:
        """Apply a notice; return False if a whole notice must be requested."""
        tree = self._tree(instance_id)
        return tree is None or tree.on_notice(instance_id, incarnation, notice, now_seconds)

    def lost(self, instance_id: str) -> None:
        tree = self._tree(instance_id)
        if tree is not None:
            tree.lost(instance_id)

    def chain(self, tokens: npt.NDArray[np.int32], model: str, root: str) -> PromptChain:
        """Hash a prompt's blocks, once for each request.

        :param tokens: int32.
        """
        short_tokens = max(
            (g.short_rope_tokens for g in self._groups if g.model == model), default=0
        )
        root = long_root(root) if 0 < short_tokens < len(tokens) else root
        return PromptChain.of(tokens, self._groups, model, root, self._memo)

    def hits(self, chain: PromptChain, now_seconds: float) -> Mapping[str, int]:
        """Return the tokens that each instance could resume, without instances that have none."""
        hits: dict[str, int] = {}
        for tree in self._trees.values():
            hits.update(tree.match(chain, now_seconds))
        return hits

    def on_routed(
        self, instance_id: str, incarnation: int, chain: PromptChain, now_seconds: float
    ) -> None:
        tree = self._tree(instance_id)
        if tree is not None:
            tree.expect(instance_id, incarnation, chain, now_seconds)

    def _tree(self, instance_id: str) -> PromptTree | None:
        return self._trees.get(self._roles.get(instance_id, ""))
