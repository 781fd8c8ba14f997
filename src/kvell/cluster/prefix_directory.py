"""What instances cache, as far as their notices tell: a prompt tree for each role.

Source: MemServe §6, global prompt trees.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvell.cluster.trees.chains import PromptChain
from kvell.cluster.trees.memo import HashMemo
from kvell.cluster.trees.tree import PromptTree, TreeGroup
from kvell.engine.protocol.notices import IndexedGroup, IndexNotice
from kvell.engine.requests.cache_roots import long_root

BY_LOCALITY = ("longest-prefix", "prompt-tree")
"""Routing policies that read what instances cache."""


class PrefixDirectory:
    """Prompt trees of a front; pure.

    Instances of one role have equal layouts; those of several roles may cache different things.
    """

    def __init__(self) -> None:
        self._trees: dict[str, PromptTree] = {}
        self._roles: dict[str, str] = {}
        self._groups: tuple[TreeGroup, ...] = ()
        self._memo = HashMemo()

    def joined(self, instance_id: str, role: str, indexed: Sequence[IndexedGroup]) -> None:
        """An incarnation of an instance serves, whose notices tell of these groups."""
        self._groups = self._groups or tuple(map(TreeGroup.of, indexed))
        self._roles[instance_id] = role
        if role not in self._trees:
            self._trees[role] = PromptTree(self._groups)

    def noticed(
        self, instance_id: str, incarnation: int, notice: IndexNotice, now_seconds: float
    ) -> bool:
        """Take in a notice; whether none is missing before it."""
        tree = self._tree(instance_id)
        return tree is None or tree.noticed(instance_id, incarnation, notice, now_seconds)

    def lost(self, instance_id: str) -> None:
        """An instance died or left: it has nothing cached."""
        tree = self._tree(instance_id)
        if tree is not None:
            tree.lost(instance_id)

    def chain(self, tokens: npt.NDArray[np.int32], model: str, root: str) -> PromptChain:
        """Name a prompt's blocks, once for each request.

        :param tokens: int32.
        """
        short_tokens = max(
            (g.short_rope_tokens for g in self._groups if g.model == model), default=0
        )
        root = long_root(root) if 0 < short_tokens < len(tokens) else root
        return PromptChain.of(tokens, self._groups, model, root, self._memo)

    def hits(self, chain: PromptChain, now_seconds: float) -> Mapping[str, int]:
        """Tokens that each instance could resume behind; none of those that have nothing."""
        found: dict[str, int] = {}
        for tree in self._trees.values():
            found.update(tree.match(chain, now_seconds))
        return found

    def routed(
        self, instance_id: str, incarnation: int, chain: PromptChain, now_seconds: float
    ) -> None:
        """A request goes to an instance, which will cache its prompt soon."""
        tree = self._tree(instance_id)
        if tree is not None:
            tree.expect(instance_id, incarnation, chain, now_seconds)

    def _tree(self, instance_id: str) -> PromptTree | None:
        return self._trees.get(self._roles.get(instance_id, ""))
