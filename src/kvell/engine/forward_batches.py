"""What one model computes in a pass, as tensors: the work of a plan over that model's groups."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvell.attention.interface import GroupBatch, HostLengths
from kvell.attention.states import StateBatch
from kvell.engine.batching import (
    GroupArrays,
    Ints,
    PageTables,
    StateArrays,
    WorkRows,
    token_positions,
)
from kvell.engine.image_batching import ImageBatcher
from kvell.engine.plan import NewPages, TokenWork
from kvell.memory import GroupKind, Layout
from kvell.models.image_batch import IMAGE_KINDS
from kvell.models.image_store import ImageStore
from kvell.models.paged_model import ForwardBatch

NO_CHECKPOINTS = np.empty((0, 5), np.int32)


class ForwardBatches:
    """Batches for one model; tables are those of the whole pool.

    :param groups: which groups of the pool are the model's, in the order in which it knows them.
    :param images: of requests in flight, if the model takes any.
    """

    def __init__(
        self,
        layout: Layout,
        tables: PageTables,
        groups: Sequence[int],
        device: torch.device,
        images: ImageStore | None = None,
    ) -> None:
        self._layout = layout
        self._tables = tables
        self._groups = groups
        self._device = device
        self._images = images and ImageBatcher(layout.groups, groups, tables, images)

    def batch(
        self,
        work: Sequence[TokenWork],
        checkpoints: NewPages = NO_CHECKPOINTS,
        num_logits: Sequence[int] | None = None,
        *,
        wants_largest: bool = False,
        begun: Callable[[], None] | None = None,
    ) -> ForwardBatch:
        """The work as one ragged batch.

        :param num_logits: how many of each work's tokens, the last ones, give logits; as many
            as the work says if it is not given.
        :param wants_largest: is it asked where each row's logits are largest?
        :param begun: called when the pass begins to compute.
        """
        rows = WorkRows.of(work)
        own = [w.num_logits for w in work]
        logits = np.fromiter(own if num_logits is None else num_logits, np.int64, len(work))
        logits_rows = token_positions(np.cumsum(rows.counts) - logits, logits)
        images = self._images
        known = [images.literal(w) if images else w.token_ids for w in work]
        token_ids = np.concatenate(known).astype(np.int64)
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids).to(self._device),
            positions=torch.from_numpy(rows.positions).to(self._device),
            groups=tuple(self._group(index, work, rows, checkpoints) for index in self._groups),
            logits_rows=torch.from_numpy(logits_rows).to(self._device),
            images=self._images.batch(work, self._device) if self._images else None,
            prompt_ends=self._prompt_ends(work),
            wants_largest=wants_largest,
            begun=begun,
        )

    def _prompt_ends(self, work: Sequence[TokenWork]) -> tuple[int, ...]:
        """Requests whose prompts end here, where layers then drop tokens."""
        if not any(self._layout.groups[i].kind is GroupKind.DROPPING for i in self._groups):
            return ()
        ends = enumerate(w.start + w.count - w.proposed == w.prompt_tokens for w in work)
        return tuple(index for index, is_end in ends if is_end)

    def _group(
        self, index: int, work: Sequence[TokenWork], rows: WorkRows, checkpoints: NewPages
    ) -> GroupBatch | StateBatch | None:
        if self._layout.groups[index].kind in IMAGE_KINDS:
            return None
        if self._layout.groups[index].kind is GroupKind.STATE:
            return _to_pool(self._tables.states(index, work, checkpoints, rows), self._device)
        return _to_device(self._tables.arrays(index, work, rows), self._device)


def _to_pool(arrays: StateArrays, device: torch.device) -> StateBatch:
    """Pages to where the pool is; what cuts scans stays on the CPU."""
    ends = None if arrays.end_page_ids is None else torch.from_numpy(arrays.end_page_ids)
    return StateBatch(
        query_starts=torch.from_numpy(arrays.query_starts),
        starts=torch.from_numpy(arrays.starts),
        page_ids=torch.from_numpy(arrays.page_ids).to(device),
        cut_requests=torch.from_numpy(arrays.cut_requests),
        cut_tokens=torch.from_numpy(arrays.cut_tokens),
        cut_page_ids=torch.from_numpy(arrays.cut_page_ids).to(device),
        end_page_ids=None if ends is None else ends.to(device),
    )


def _to_device(arrays: GroupArrays, device: torch.device) -> GroupBatch:
    on_host = device.type == "cpu"

    def there(values: Ints) -> torch.Tensor:
        made = torch.from_numpy(values)
        return made if on_host else made.to(device)

    return GroupBatch(
        query_starts=there(arrays.query_starts),
        context_lens=there(arrays.context_lens),
        table_starts=there(arrays.table_starts),
        page_ids=there(arrays.page_ids),
        first_positions=there(arrays.first_positions),
        write_page_ids=there(arrays.write_page_ids),
        write_offsets=there(arrays.write_offsets),
        host=None if on_host else _lengths(arrays),
    )


def _lengths(arrays: GroupArrays) -> HostLengths:
    """What kernels on a GPU cut their launches by."""
    return HostLengths(
        query_starts=torch.from_numpy(arrays.query_starts),
        context_lens=torch.from_numpy(arrays.context_lens),
        table_starts=torch.from_numpy(arrays.table_starts),
        first_positions=torch.from_numpy(arrays.first_positions),
    )
