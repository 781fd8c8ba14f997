"""Rows of a trace, and data derived from them: sessions, placed images, ideal hits.

A block id stands for the content of a run of ``block_tokens`` prompt tokens together with all
content before it, so two prompts share exactly their longest common run of leading ids. ("Block" is
the word of the trace format; it is not a page.)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]
MAX_IMAGE_ID = (1 << 31) - 1
"""An image's tokens are ``-1 - id`` as int32."""


NO_IDS: BlockIds = np.empty(0, np.int64)
"""The ids of a prompt without blocks; all rows share them."""


@dataclass(frozen=True)
class ImageRow:
    """One image of a prompt.

    :param start: text tokens before it; images at one position keep their order.
    :param tokens: number of tokens that the encoder makes of it, at least 1.
    :param id: identifies its content, 0 … ``MAX_IMAGE_ID``.
    """

    start: int
    tokens: int
    id: int


@dataclass(frozen=True, eq=False, slots=True)
class TraceRow:
    """One request.

    :param arrival_s: seconds after the first request.
    :param prompt_tokens: text tokens; those of images are not counted.
    :param block_ids: int64 [b], ids of the prompt's leading blocks; tokens after them are unique.
    :param block_tokens: text tokens of a block; 0 without ids.
    :param session: rows of one session are turns: each is sent after the answer to the previous.
    :param images: in order of position in the text.
    :param continues: the prompt begins with the prompt and the output of the session's last row.
    :param will_return: the client's hint whether a later prompt begins with this one.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: BlockIds = field(default_factory=lambda: NO_IDS)
    block_tokens: int = 0
    session: str | None = None
    images: tuple[ImageRow, ...] = ()
    continues: bool = False
    will_return: bool | None = None

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


Span = tuple[int, int, int]
"""Place of an image in a prompt: first token, tokens in the prompt, tokens of the image."""


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt as a model sees it.

    :param prompt_tokens: includes the tokens that stand for images.
    """

    prompt_tokens: int
    images: tuple[Span, ...]


def place(row: TraceRow, images_in_text: bool) -> PlacedPrompt:
    """Place a row's images in its text.

    :param images_in_text: whether an image's tokens are part of the prompt; if not, one token
        stands for it, and the text attends to the image by cross-attention.
    """
    spans: list[Span] = []
    before = 0
    for image in row.images:
        here = image.tokens if images_in_text else 1
        spans.append((image.start + before, here, image.tokens))
        before += here
    return PlacedPrompt(row.prompt_tokens + before, tuple(spans))


def predecessors(rows: Sequence[TraceRow]) -> list[int | None]:
    """Return for each row the index of its session's previous row; None for a first turn."""
    last: dict[str, int] = {}
    previous: list[int | None] = []
    for index, row in enumerate(rows):
        previous.append(None if row.session is None else last.get(row.session))
        if row.session is not None:
            last[row.session] = index
    return previous


def continuation_problem(row: TraceRow, before: TraceRow | None) -> str | None:
    """Return why ``row`` cannot continue ``before``, its session's last row; None if it can."""
    if not row.continues:
        return None
    if before is None:
        return "is true, but no earlier line is of the same session"
    if len(row.block_ids):
        return "is true, but the line has block_hashes of its own"
    if row.prompt_tokens <= before.num_tokens:
        return f"is true, but the session's last line ends at {before.num_tokens} tokens"
    seen = len(before.images)
    is_inherited = row.images[:seen] == before.images
    if not is_inherited or any(i.start < before.num_tokens for i in row.images[seen:]):
        return "is true, but images of the session's last line are not those at its beginning"
    return None


def repeat(rows: Sequence[TraceRow], times: int) -> list[TraceRow]:
    """Return the trace repeated ``times`` times with the same ids, each shifted by its span.

    Each repetition has its own sessions: they do not wait for those before.
    """
    span_s = rows[-1].arrival_s - rows[0].arrival_s
    return [_again(row, turn, span_s) if turn else row for turn in range(times) for row in rows]


def _again(row: TraceRow, turn: int, span_s: float) -> TraceRow:
    session = None if row.session is None else f"{row.session}#{turn}"
    return replace(row, arrival_s=row.arrival_s + turn * span_s, session=session)


def ideal_hit_tokens(rows: Sequence[TraceRow]) -> int:
    """Return the text tokens that an unbounded cache hits, with requests in sequence; for rows
    without images.

    A prompt's last token is always computed, and an output's last token never is.
    """
    seen: dict[int, int] = {}
    hit_tokens = 0
    for row, before in zip(rows, predecessors(rows), strict=True):
        if row.continues and before is not None:
            reusable = rows[before].num_tokens - 1
        else:
            reusable = _known_tokens(row, seen) if len(row.block_ids) else 0
        hit_tokens += min(reusable, row.prompt_tokens - 1)
    return hit_tokens


def _known_tokens(row: TraceRow, seen: dict[int, int]) -> int:
    """Return the leading tokens of a row's blocks (≥ 1) that were seen; add the row to ``seen``.

    :param seen: block id → the most tokens of it that a prompt has had.
    """
    ids = row.block_ids.tolist()
    size = row.block_tokens
    last = row.prompt_tokens - size * (len(ids) - 1)
    sizes = [*itertools.repeat(size, len(ids) - 1), min(size, last)]
    reusable = 0
    for block, here in zip(ids, sizes, strict=True):
        before = seen.get(block, 0)
        reusable += min(here, before)
        if before < here:
            break
    seen.update(dict.fromkeys(ids[:-1], size))
    seen[ids[-1]] = max(sizes[-1], seen.get(ids[-1], 0))
    return reusable
