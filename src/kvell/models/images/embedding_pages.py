"""Embeddings of image tokens inside pages.

They have pages of their own, or use the place of their keys and values:

    pages of their own     [page_tokens][hidden]
    in keys' and values'   row r of every vector block is token r's: an embedding is cut into
                           pieces of one row's length, one for each block in order

    page ─┬─ block 0 [page_tokens][row] ── row r: piece 0 of token r's embedding
          ├─ block 1 [page_tokens][row] ── row r: piece 1
          └─ …

So a chunk that writes keys and values of some tokens of a page leaves the embeddings of the others
unchanged (Jenga §6.2, fig. 12b).
"""

import torch

from kvell.models.images.image_batch import PageRows
from kvell.pages.layout import GroupKind, GroupSpec, LayerSpec


class EmbeddingPages:
    """A view of the pool, [pages, blocks, page_tokens, row bytes]."""

    def __init__(
        self, group: GroupSpec, layers: tuple[LayerSpec, ...], pool: torch.Tensor, size: int
    ) -> None:
        """Make the view.

        :param layers: the group's layers.
        :param size: numbers in an embedding.
        """
        first = layers[0]
        vectors = 1 if group.kind is GroupKind.VISION else first.tensors * first.kv_heads
        blocks = vectors * len(group.layers)
        row_bytes = group.layer_token_bytes // vectors
        pages = pool.numel() // group.page_stride_bytes
        whole = pool[: pages * group.page_stride_bytes].view(pages, -1)[:, : group.page_bytes]
        self._size = size
        self._view: torch.Tensor = whole.view(pages, blocks, group.page_tokens, row_bytes)

    def store(self, rows: PageRows, embeddings: torch.Tensor) -> None:
        """Write embeddings, [n, size] of any float dtype.

        :raises ValueError: if an embedding is longer than a token's rows in the page.
        """
        raw = embeddings.contiguous().view(torch.uint8)
        blocks = self._blocks(raw.shape[1])
        padded = raw.new_zeros(len(raw), blocks * self._view.shape[3])
        padded[:, : raw.shape[1]] = raw
        pieces = padded.view(len(raw), blocks, -1)
        self._view[:, :blocks].transpose(1, 2)[rows.page_ids, rows.offsets] = pieces

    def load(self, rows: PageRows, dtype: torch.dtype) -> torch.Tensor:
        """Read embeddings, [n, size]."""
        raw_bytes = self._size * dtype.itemsize
        blocks = self._blocks(raw_bytes)
        pieces = self._view[:, :blocks].transpose(1, 2)[rows.page_ids, rows.offsets]
        return pieces.flatten(1)[:, :raw_bytes].contiguous().view(dtype)

    def _blocks(self, raw_bytes: int) -> int:
        blocks = -(-raw_bytes // self._view.shape[3])
        if blocks > self._view.shape[1]:
            raise ValueError(f"a token of {raw_bytes} bytes does not fit in its row of the page")
        return blocks
