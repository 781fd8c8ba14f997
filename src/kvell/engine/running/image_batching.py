"""A step's images: images to encode, tokens that take an embedding, images that tokens see."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvell.attention.interface import GroupBatch
from kvell.engine.requests.plan import TokenWork
from kvell.engine.running.batching import Ints, PageTables
from kvell.memory import IMAGE_KINDS, GroupSpec, ImageSpan
from kvell.models.images.grid_positions import Grid, grid_positions
from kvell.models.images.image_batch import ImageBatch, PageRows, SeenImages
from kvell.models.images.image_content import Span
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
        """Return positions of all tokens of the step, by the images of their whole prefix."""
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
    for image in _touched(work):
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


def _touched(work: TokenWork) -> Iterator[ImageSpan]:
    return (image for _, image in _numbered(work) if image.end > work.start)


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
