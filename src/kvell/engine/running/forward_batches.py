"""One model's forward batch as tensors: the work of a plan over that model's groups."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
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
from kvell.memory import IMAGE_KINDS, GroupKind, GroupSpec, ImageSpan, Layout
from kvell.models.captured.slots import DecodeRows
from kvell.models.forward.forward_batch import ForwardBatch, HostForwardBatch
from kvell.models.images.image_batch import ImageBatch, PageRows, SeenImages
from kvell.models.images.image_content import Span
from kvell.models.images.image_grids import Grid, grid_positions
from kvell.models.images.image_store import ImageStore

Rows = list[tuple[Ints, Ints]]
"""Pairs of (pages, rows inside them)."""


class ImageBatcher:
    """A builder of the :class:`ImageBatch` of a step's work."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        model_groups: Sequence[int],
        tables: PageTables,
        store: ImageStore,
    ) -> None:
        """:param model_groups: indices; the first group that holds its encoder's output is used."""
        self._index = next(
            i for i in model_groups if groups[i].kind in IMAGE_KINDS or groups[i].holds_embeddings
        )
        self._group = groups[self._index]
        self._tables = tables
        self._store = store

    def batch(self, works: Sequence[TokenWork], device: torch.device) -> ImageBatch | None:
        """Build the step's image batch; None if no request of the step has images.

        :raises RuntimeError: if a step cuts a span that must be computed whole.
        """
        if not any(work.spec.images for work in works):
            return None
        family = self._store.family
        prefixes = tuple(map(_prefix, works)) if family.both_directions else ()
        begins = np.cumsum([0, *(work.count for work in works)])
        taken = [x for b, w in zip(begins, works, strict=False) for x in self._taken(int(b), w)]
        rows, pages, offsets = (_joined([entry[i] for entry in taken]) for i in range(3))
        return ImageBatch(
            tuple(x for work in works for x in self._begun(work, device)),
            torch.from_numpy(rows.astype(np.int64)).to(device),
            _page_rows(pages, offsets, device),
            () if family.in_text else self._seen(begins, works, device),
            prefixes,
            self._positions(works, device) if family.in_grids else None,
        )

    def _positions(self, works: Sequence[TokenWork], device: torch.device) -> torch.Tensor:
        positions = [grid_positions(w.start, w.count, self._grids(w)) for w in works]
        return torch.from_numpy(np.concatenate(positions, axis=1)).to(device)

    def _grids(self, work: TokenWork) -> list[Grid]:
        """Return the grids of all images that have begun, also before the work's first token."""
        spans = ((x.start, self._store.span(work.spec.image_ids[i])) for i, x in _numbered(work))
        return [Grid(at, *image.grid) for at, span in spans for image in span.images if image.grid]

    def _begun(self, work: TokenWork, device: torch.device) -> Iterator[tuple[Span, PageRows]]:
        """Yield images to encode, whose first token is in the work, and their tokens' rows."""
        for number, image in _numbered(work):
            is_first = work.start <= image.start < work.start + work.count
            if is_first and number >= work.embedded:
                span = self._span(image, work)
                indices = np.arange(image.image_tokens, dtype=np.int32)
                places = np.flatnonzero(span.image_indices >= 0) + image.start
                yield span, _page_rows(*self._places(work, number, indices, places), device)

    def _taken(self, begin: int, work: TokenWork) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield (row of the step, page, row of the page) of the tokens that take an embedding."""
        for number, image in _numbered(work) if self._store.family.in_text else ():
            low, high = _overlap(image, work)
            if low < high:
                indices = self._span(image, work).image_indices[
                    low - image.start : high - image.start
                ]
                at = np.flatnonzero(indices >= 0)
                pages, offsets = self._places(work, number, indices[at], at + low)
                yield (at + (begin + low - work.start)).astype(np.int32), pages, offsets

    def _places(
        self, work: TokenWork, number: int, indices: Ints, positions: npt.NDArray[np.int64]
    ) -> tuple[Ints, Ints]:
        """Return pages of an image's tokens, and rows inside them.

        They follow from the index in the image, or from the position in the text if embeddings are
        stored in pages that keys and values will overwrite.
        """
        size = self._group.page_tokens
        at = positions if self._group.holds_embeddings else indices
        first = 0 if self._group.holds_embeddings else self._first_page(work, number)
        table = self._tables.table(work.handle, self._index)
        return table[first + at // size], (at % size).astype(np.int32)

    def _first_page(self, work: TokenWork, number: int) -> int:
        """Return the position of an image's first page; each image has whole pages, in order."""
        return sum(
            -(-tokens // self._group.page_tokens) for _, _, tokens in work.spec.images[:number]
        )

    def _span(self, image: ImageSpan, work: TokenWork) -> Span:
        return _span_in(image, work, self._store)

    # ----------------------------------------------------------- attending across

    def _seen(
        self, begins: npt.NDArray[np.int64], works: Sequence[TokenWork], device: torch.device
    ) -> tuple[SeenImages, ...]:
        """Return for each token the last image before it, and the images directly before that."""
        layers: list[list[tuple[int, Ints, int]]] = []
        for begin, work in zip(begins.tolist(), works, strict=False):
            tables = [self._image_table(work, number) for number, _ in _numbered(work)]
            for position in range(work.start, work.start + work.count):
                for depth, number in enumerate(seen_images(work.spec.images, position)):
                    if depth == len(layers):
                        layers.append([])
                    row = begin + position - work.start
                    layers[depth].append((row, tables[number], work.spec.images[number][2]))
        return tuple(_seen_at(layer, device) for layer in layers)

    def _image_table(self, work: TokenWork, number: int) -> Ints:
        first = self._first_page(work, number)
        count = self._first_page(work, number + 1) - first
        return self._tables.table(work.handle, self._index)[first : first + count]


def literal(work: TokenWork, store: ImageStore) -> Ints:
    """Return the work's token ids, with the user's ids for images."""
    ids = work.token_ids.copy()
    for image in [image for _, image in _numbered(work) if image.end > work.start]:
        low, high = _overlap(image, work)
        span = _span_in(image, work, store)
        ids[low - work.start : high - work.start] = span.token_ids[
            low - image.start : high - image.start
        ]
    return ids


def seen_images(images: Sequence[tuple[int, int, int]], position: int) -> list[int]:
    """Return the images that the token at a position cross-attends to, the last one first.

    These are the last image that has begun and the images whose placeholders directly precede it.
    """
    begun = [number for number, image in enumerate(images) if image[0] <= position]
    seen: list[int] = []
    for number in reversed(begun):
        if seen and images[number][0] + images[number][1] != images[seen[-1]][0]:
            break
        seen.append(number)
    return seen


def _seen_at(tokens: list[tuple[int, Ints, int]], device: torch.device) -> SeenImages:
    tables = [table for _, table, _ in tokens]
    starts = np.cumsum([0, *map(len, tables)]).astype(np.int32)
    lens = np.asarray([count for _, _, count in tokens], np.int32)
    batch = GroupBatch(
        query_starts=torch.arange(len(tokens) + 1, dtype=torch.int32, device=device),
        context_lens=torch.from_numpy(lens).to(device),
        table_starts=torch.from_numpy(starts).to(device),
        page_ids=torch.from_numpy(_joined(tables)).to(device),
        first_positions=torch.zeros(len(tokens), dtype=torch.int32, device=device),
        write_page_ids=torch.empty(0, dtype=torch.int32, device=device),
        write_offsets=torch.empty(0, dtype=torch.int32, device=device),
    )
    rows = torch.tensor([row for row, _, _ in tokens], device=device)
    return SeenImages(rows, batch)


def _numbered(work: TokenWork) -> Iterator[tuple[int, ImageSpan]]:
    spans = (ImageSpan(*row) for row in work.spec.images)
    return ((i, span) for i, span in enumerate(spans) if span.start < work.start + work.count)


def _span_in(image: ImageSpan, work: TokenWork, store: ImageStore) -> Span:
    last = min(image.end, work.start + work.count) - 1
    return store.span(int(work.token_ids[last - work.start]))


def _overlap(image: ImageSpan, work: TokenWork) -> tuple[int, int]:
    return max(image.start, work.start), min(image.end, work.start + work.count)


def _prefix(work: TokenWork) -> int:
    """Return the number of tokens at the work's start that attend in both directions."""
    tokens = work.spec.images[0][1] if work.spec.images and not work.start else 0
    if tokens > work.count:
        raise RuntimeError(f"a prompt of {tokens} tokens for one step is cut after {work.count}")
    return tokens


def _page_rows(pages: Ints, offsets: Ints, device: torch.device) -> PageRows:
    return PageRows(
        torch.from_numpy(pages.astype(np.int64)).to(device),
        torch.from_numpy(offsets.astype(np.int64)).to(device),
    )


def _joined(pieces: Sequence[Ints]) -> Ints:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


NO_CHECKPOINTS = np.empty((0, 5), np.int32)


class ForwardBatches:
    """A builder of batches for one model.

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
        self.drops = GroupKind.DROPPING in kinds.values()
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
        if not self.drops:
            return ()
        ends = enumerate(w.start + w.count - w.proposed == w.spec.prompt_tokens for w in work)
        return tuple(index for index, is_end in ends if is_end)

    def _group(
        self, index: int, work: Sequence[TokenWork], rows: WorkRows, checkpoints: NewPages
    ) -> GroupBatch | StateBatch | None:
        if index in self._of_images:
            return None
        if index in self._of_states:
            if self._on_host and not len(checkpoints) and not any(w.proposed for w in work):
                return HostStateBatch(self._tables.running_states(index, rows))
            return _to_pool(self._tables.states(index, work, checkpoints, rows), self._device)
        return to_device(self._tables.arrays(index, work, rows), self._device)


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


def to_device(arrays: GroupArrays, device: torch.device) -> GroupBatch:
    if device.type == "cpu":
        return HostGroupBatch(arrays)
    there = torch.from_numpy(arrays.flat).to(device)
    lengths = HostLengths(
        query_starts=torch.from_numpy(arrays.query_starts),
        context_lens=torch.from_numpy(arrays.context_lens),
        table_starts=torch.from_numpy(arrays.table_starts),
        first_positions=torch.from_numpy(arrays.first_positions),
    )
    return GroupBatch(*there.split_with_sizes(arrays.sizes), host=lengths)
