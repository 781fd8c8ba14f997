"""Attention shapes, and batches of requests in shuffled pages, for the benches of attention."""

from dataclasses import dataclass

import torch

from kvell.attention.interface import GroupBatch

PAGE_TOKENS = 16


@dataclass(frozen=True)
class Heads:
    """A model's attention shape."""

    name: str
    heads: int
    kv_heads: int
    head_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, bf16."""
        return 2 * self.kv_heads * self.head_size * 2


def make_batch(requests: int, context: int, new: int, page_tokens: int = PAGE_TOKENS) -> GroupBatch:
    """Requests of one length in shuffled pages."""
    pages = context // page_tokens

    def starts(each: int) -> torch.Tensor:
        return torch.arange(0, (requests + 1) * each, each, dtype=torch.int32)

    empty = torch.zeros(0, dtype=torch.int32)
    return GroupBatch(
        starts(new),
        torch.full((requests,), context, dtype=torch.int32),
        starts(pages),
        torch.randperm(requests * pages).to(torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        empty,
        empty,
    )
