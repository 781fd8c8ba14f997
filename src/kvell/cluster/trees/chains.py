"""A prompt as its blocks' hashes, made once and asked of many trees."""

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

    :param tokens: of the prompt.
    :param model: which of several models it is for.
    :param hashes: block size → the hashes of all whole blocks, in order.
    :param alignment_tokens: whole blocks in every group that counts tokens, and in states.
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

        :param tokens: int32; of images, the ids that the instances get.
        :param groups: of the instances that are asked.
        :param root: the cache root, as instances make it of salt, adapter and the like.
        :param memo: of a caller that hashes many prompts.
        """
        made = HashMemo() if memo is None else memo  # an empty one is false
        sizes = {one.block_tokens for one in groups if one.required and one.model == model}
        hashes = {size: made.hashes(tokens, size, model, root) for size in sorted(sizes)}
        return cls(len(tokens), model, MappingProxyType(hashes), math.lcm(*sizes))

    @property
    def limit_tokens(self) -> int:
        """The longest prefix that may be resumed: the last token is always computed."""
        return max(0, self.tokens - 1)
