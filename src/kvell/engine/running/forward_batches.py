"""One model's forward batch as tensors: the work of a plan over that model's groups."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvell.attention.host_batch import HostGroupBatch, HostRows, HostStateBatch
from kvell.attention.interface import GroupBatch, HostLengths
from kvell.attention.states import StateBatch
from kvell.engine.requests.plan import NewPages, TokenWork
from kvell.engine.running.batching import (
    GroupArrays,
    Ints,
    PageTables,
    StateArrays,
    WorkRows,
)
from kvell.engine.running.image_batching import ImageBatcher, literal
from kvell.memory import IMAGE_KINDS, GroupKind, Layout
from kvell.models.captured.slots import DecodeRows
from kvell.models.forward.forward_batch import ForwardBatch, HostForwardBatch
from kvell.models.images.image_store import ImageStore

NO_CHECKPOINTS = np.empty((0, 5), np.int32)


class ForwardBatches:
    """A builder of batches for one model.

    :param tables: page tables of the whole pool.
    :param groups: indices of the model's groups in the pool, in the model's order.
    :param images: images of requests in flight, if the model takes images, or drafts for one that
        does: then it reads the placeholders of images as tokens.
    """

    def __init__(
        self,
        layout: Layout,
        tables: PageTables,
        groups: Sequence[int],
        device: torch.device,
        images: ImageStore | None = None,
    ) -> None:
        self._tables = tables
        self._groups = groups
        self._device = device
        self._on_host = device.type == "cpu"
        kinds = {index: layout.groups[index].kind for index in groups}
        self._drops = GroupKind.DROPPING in kinds.values()
        self._of_images = {index for index in groups if kinds[index] in IMAGE_KINDS}
        self._of_states = {index for index in groups if kinds[index] is GroupKind.STATE}
        self._store = images
        self._images: ImageBatcher | None = None
        if images is not None and not any(layout.groups[index].is_draft for index in groups):
            self._images = ImageBatcher(layout.groups, groups, tables, images)

    def batch(
        self,
        work: Sequence[TokenWork],
        checkpoints: NewPages = NO_CHECKPOINTS,
        num_logits: Sequence[int] | None = None,
        *,
        wants_largest: bool = False,
        begun: Callable[[], None] | None = None,
        wants_hidden: bool = False,
    ) -> ForwardBatch:
        """Return the work as one ragged batch.

        :param num_logits: number of tokens at the end of each work that give logits; by default
            ``num_logits`` of the work.
        :param wants_largest: whether to compute the argmax of each row's logits.
        :param begun: called when the pass begins to compute.
        :param wants_hidden: whether to keep the head's input of each row.
        """
        rows = WorkRows.of(work)
        logits = [w.num_logits for w in work] if num_logits is None else list(num_logits)
        images = self._images
        store = self._store
        literal_ids = [literal(w, store) if store else w.token_ids for w in work]
        tokens = self._tables.token_rows(rows, logits, literal_ids)
        groups = tuple(self._group(index, work, rows, checkpoints) for index in self._groups)
        seen = images.batch(work, self._device) if images else None
        ends = self._prompt_ends(work)
        options = (wants_largest, begun, wants_hidden, self._long_rope(work))
        if self._on_host:
            return HostForwardBatch(tokens, groups, seen, ends, *options)
        ids, positions, wanted = (part.to(self._device) for part in tokens.tensors)
        return ForwardBatch(ids, positions, groups, wanted, seen, ends, *options)

    @property
    def drops(self) -> bool:
        """Whether layers drop prompt tokens."""
        return self._drops

    def decode_rows(
        self, work: Sequence[TokenWork], sources: Ints | None = None, targets: Ints | None = None
    ) -> DecodeRows:
        """Return work of one token each as arrays in host memory.

        :param sources: seats of the tokens that the device knows, as in :class:`DecodeRows`.
        :param targets: seats of the tokens that are drawn.
        """
        rows = WorkRows.of(work)
        token_ids = np.fromiter((w.token_ids.item(0) for w in work), np.int64, len(work))
        groups = [self._host_rows(index, work, rows) for index in self._groups]
        return DecodeRows(token_ids, rows.positions, groups, sources, targets)

    def _host_rows(self, index: int, work: Sequence[TokenWork], rows: WorkRows) -> HostRows | None:
        if index in self._of_images:
            return None
        if index in self._of_states:
            return self._tables.running_states(index, rows)
        return self._tables.arrays(index, work, rows)

    def _long_rope(self, work: Sequence[TokenWork]) -> torch.Tensor | None:
        """Return a mask of tokens with long RoPE, bool [T]; None if there are none."""
        is_long = [w.uses_long_rope for w in work]
        if not any(is_long):
            return None
        tokens = np.repeat(np.array(is_long), [w.count for w in work])
        return torch.from_numpy(tokens).to(self._device)

    def _prompt_ends(self, work: Sequence[TokenWork]) -> tuple[int, ...]:
        """Return the indices of work that ends a prompt, if layers then drop tokens; else none."""
        if not self._drops:
            return ()
        ends = enumerate(w.start + w.count - w.proposed == w.spec.prompt_tokens for w in work)
        return tuple(index for index, is_end in ends if is_end)

    def _group(
        self, index: int, work: Sequence[TokenWork], rows: WorkRows, checkpoints: NewPages
    ) -> GroupBatch | StateBatch | None:
        if index in self._of_images:
            return None
        if index in self._of_states:
            return self._states(index, work, rows, checkpoints)
        return _to_device(self._tables.arrays(index, work, rows), self._device)

    def _states(
        self, index: int, work: Sequence[TokenWork], rows: WorkRows, checkpoints: NewPages
    ) -> StateBatch:
        if self._on_host and not len(checkpoints) and not any(w.proposed for w in work):
            return HostStateBatch(self._tables.running_states(index, rows))
        return _to_pool(self._tables.states(index, work, checkpoints, rows), self._device)


def _to_pool(arrays: StateArrays, device: torch.device) -> StateBatch:
    """Copy page ids to the pool's device; the arrays that cut scans stay on the CPU."""
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
    if device.type == "cpu":
        return HostGroupBatch(arrays)
    there = torch.from_numpy(arrays.flat).to(device)
    return GroupBatch(*there.split_with_sizes(arrays.sizes), host=_lengths(arrays))


def _lengths(arrays: GroupArrays) -> HostLengths:
    return HostLengths(
        query_starts=torch.from_numpy(arrays.query_starts),
        context_lens=torch.from_numpy(arrays.context_lens),
        table_starts=torch.from_numpy(arrays.table_starts),
        first_positions=torch.from_numpy(arrays.first_positions),
    )
