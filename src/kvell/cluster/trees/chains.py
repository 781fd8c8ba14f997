"""A prompt as the hashes of its blocks, made once for many trees."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvell.cluster.trees.groups import TreeGroup
from kvell.cluster.trees.memo import HashMemo
from kvell.memory import Tokens


@dataclass(frozen=True)
class PromptChain:
    """A prompt's block hashes for each block size that its model needs.

    :param tokens: number of tokens of the prompt.
    :param model: which of several models the prompt is for.
    :param hashes: block size → the hashes of all whole blocks, in order.
    :param alignment_tokens: lengths of this multiple are whole blocks, and states, in every group.
    """

    tokens: int
    model: str
    hashes: Mapping[int, Sequence[int]]
    alignment_tokens: int

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        groups: Sequence[TreeGroup],
        model: str = "",
        root: str = "",
        memo: HashMemo | None = None,
    ) -> "PromptChain":
        """Hash a prompt.

        :param tokens: int32; images have the ids that instances get.
        :param groups: layer groups of the instances.
        :param root: the cache root, as instances make it of salt, adapter and the like.
        :param memo: kept by a caller that hashes many prompts.
        """
        made = HashMemo() if memo is None else memo  # an empty one is false
        sizes = {group.block_tokens for group in groups if group.required and group.model == model}
        hashes = {size: made.hashes(tokens, size, model, root) for size in sorted(sizes)}
        return cls(len(tokens), model, MappingProxyType(hashes), math.lcm(*sizes))

    @property
    def limit_tokens(self) -> int:
        return max(0, self.tokens - 1)
