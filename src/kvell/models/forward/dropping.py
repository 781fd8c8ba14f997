"""Token dropping: the choice of a long prompt's tokens that stay, and their move to the front.

When a prompt that is longer than a layer's budget has been computed, its last ``OBSERVED_TOKENS``
tokens vote for the earlier ones with the attention that they pay to them::

    votes[head, j] = Σ over observing tokens, over query heads of the KV head, of softmax(q·k)[j]

Votes are max-pooled over ``POOLED_TOKENS`` neighbours, so that a token's surroundings stay with it.
The best tokens fill the budget besides the observing tokens, which always stay; of equal tokens the
earlier one stays. Each KV head chooses for itself, and a latent (MLA) is one head. Then rows 0 …
budget-1 of a layer's pages hold, head by head, the kept keys and values in order of position; keys
keep the rope of their true positions, so attention needs no change. The token after the prompt is
stored in row ``budget``.

Sources: SnapKV §4 (observation window, pooling), PyramidKV §4.2; budgets by layer:
:mod:`kvell.models.config.budgets`.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import max_pool1d

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages
from kvell.attention.quantised import dequantise
from kvell.attention.spans import page_views
from kvell.models.config.budgets import OBSERVED_TOKENS

POOLED_TOKENS = 7


def votes(query: torch.Tensor, key: torch.Tensor, params: AttendParams) -> torch.Tensor:
    """Return the sum of the attention of a prompt's last tokens to each of its tokens.

    :param query: [observing, heads, head_size], one KV head's query heads, of the last tokens.
    :param key: [tokens, head_size], of that KV head; the prompt's tokens in order.
    :param params: sinks are those of the given heads.
    :return: float32 [tokens].
    """
    observing, tokens = query.shape[0], key.shape[0]
    scores = query.float().transpose(0, 1) @ key.float().T * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    own = torch.arange(tokens - observing, tokens, device=key.device)
    later = torch.arange(tokens, device=key.device) > own[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    paid = scores.softmax(-1)
    if params.sinks is not None:  # a sink's share is paid to no token
        paid = paid * torch.sigmoid(scores.logsumexp(-1) - params.sinks[:, None])[..., None]
    return paid.sum((0, 1))


def kept_positions(votes: torch.Tensor, budget_tokens: int) -> torch.Tensor:
    """Return the positions that stay, ascending: int64 [budget_tokens].

    :param votes: float32 [tokens] of a prompt longer than the budget.
    :param budget_tokens: more than ``OBSERVED_TOKENS``, which stay in any case.
    """
    earlier = votes.shape[0] - OBSERVED_TOKENS
    pooled = max_pool1d(votes[None, :earlier], POOLED_TOKENS, 1, POOLED_TOKENS // 2)[0]
    best = pooled.sort(descending=True, stable=True).indices[: budget_tokens - OBSERVED_TOKENS]
    observing = torch.arange(earlier, votes.shape[0], device=votes.device)
    return torch.cat([best.sort().values, observing])


def keep_rows(layer: LayerPages, page_ids: torch.Tensor, kept: torch.Tensor) -> None:
    """Move the kept rows of a request's pages to the front; later rows become undefined.

    :param page_ids: [pages], the request's, in order of position.
    :param kept: int64 [kv_heads, budget], ascending for each head.
    """
    pages = page_ids.long()
    size = layer.page_tokens
    heads = torch.arange(layer.kv_heads, device=kept.device)[:, None]
    front = torch.arange(kept.shape[1], device=kept.device)
    for stored in page_views(layer):
        rows = stored[pages[kept // size], heads, kept % size]
        stored[pages[front // size], heads, front % size] = rows


class TokenDropping:
    """Token dropping in one step: chooses while layers attend, moves after all have.

    Layers that share another's keys and values read them later, so nothing may move earlier.

    :param ends: requests, by their index in the batch, whose prompts end with this step.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends
        self._moves: list[tuple[LayerPages, torch.Tensor, torch.Tensor]] = []

    def choose(
        self,
        budget_tokens: int,
        layer: LayerPages,
        group: GroupBatch,
        query: torch.Tensor,
        params: AttendParams,
    ) -> None:
        """Choose the tokens to keep of prompts that end here and are longer than the budget.

        :param query: [T, heads, head_size] of the whole step.
        """
        for request in self._ends:
            tokens = int(group.context_lens[request])
            if tokens > budget_tokens:
                last = int(group.query_starts[request + 1])
                table = slice(*group.table_starts[request : request + 2].tolist())
                pages, observing = group.page_ids[table], query[last - OBSERVED_TOKENS : last]
                kept = _kept(layer, pages, tokens, observing, params, budget_tokens)
                self._moves.append((layer, pages, kept))

    def move(self) -> None:
        """Move the kept tokens to the front of their pages; call when the step is computed."""
        for layer, pages, kept in self._moves:
            keep_rows(layer, pages, kept)
        self._moves.clear()


def _kept(
    layer: LayerPages,
    pages: torch.Tensor,
    tokens: int,
    query: torch.Tensor,
    params: AttendParams,
    budget_tokens: int,
) -> torch.Tensor:
    """Return the kept positions, int64 [kv_heads, budget]; one head at a time, to save memory."""
    by_head = query.reshape(query.shape[0], layer.kv_heads, -1, query.shape[2])
    sinks = None if params.sinks is None else params.sinks.view(layer.kv_heads, -1)
    chosen = []
    for head in range(layer.kv_heads):
        own = AttendParams(
            params.scale, softcap=params.softcap, sinks=None if sinks is None else sinks[head]
        )
        paid = votes(by_head[:, head], _keys(layer, pages, tokens, head), own)
        chosen.append(kept_positions(paid, budget_tokens))
    return torch.stack(chosen)


def _keys(layer: LayerPages, pages: torch.Tensor, tokens: int, head: int) -> torch.Tensor:
    """Return a head's stored keys of a request, [tokens, head_size], dequantised if quantised."""
    rows = page_views(layer)[0][pages.long(), head].flatten(0, 1)[:tokens]
    return dequantise(rows, layer.dtype) if layer.quantised else rows
