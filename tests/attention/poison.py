"""Pages filled with NaN wherever attention must not read."""

from collections.abc import Iterator

import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.spans import page_views
from tests.attention.cases import Shape, Stored, make_case, new_queries, store

NAN = torch.nan


def place(stored: Stored, request: int, position: int) -> tuple[int, int]:
    entry = position // stored.layer.page_tokens - int(stored.batch.first_positions[request])
    page = stored.batch.page_ids[int(stored.batch.table_starts[request]) + entry]
    return int(page), position % stored.layer.page_tokens


def spoil(stored: Stored, request: int, position: int, tensor: int) -> None:
    """Make a stored key (0) or value (-1) NaN, in all heads; a quantised one by its scale."""
    page, row = place(stored, request, position)
    view = page_views(stored.layer)[tensor]
    if not stored.layer.quantised:
        view[page, :, row] = NAN
        return
    scale = torch.tensor([NAN], dtype=torch.float32).view(torch.uint8)
    view[page, :, row, -4:] = scale


def rows_that_read(shape: Shape, request: int, position: int) -> torch.Tensor:
    """Which of the step's rows read a request's position."""
    read = []
    for i, (context, new) in enumerate(shape.requests):
        for own in range(context - new, context):
            first = shape.params.first_readable(own)
            read.append(i == request and first <= position <= own)
    return torch.tensor(read)


def check(output: torch.Tensor, sound: torch.Tensor, spoiled: torch.Tensor, where: str) -> None:
    """Spoiled rows are NaN throughout, the others have not changed a bit."""
    assert output[spoiled].isnan().all(), f"{where}: a number came of NaN"
    assert torch.equal(output[~spoiled], sound[~spoiled]), f"{where}: another row was touched"


def positions(shape: Shape) -> Iterator[tuple[int, int]]:
    """Requests, and their positions that the step's rows do not read alike, or none of them."""
    for i, (context, new) in enumerate(shape.requests):
        begin = shape.params.first_readable(context - new)
        yield from ((i, position) for position in range(begin, context))


def poison_each(kernels: AttentionKernels, shape: Shape) -> None:
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    pool = stored.layer.pool.clone()
    sound = kernels.attend(stored.layer, stored.batch, query, shape.params)
    assert not sound.isnan().any()
    for request, position in positions(shape):
        for tensor in (0, -1):
            spoil(stored, request, position, tensor)
            output = kernels.attend(stored.layer, stored.batch, query, shape.params)
            spoiled = rows_that_read(shape, request, position)
            check(output, sound, spoiled, f"request {request}, {tensor}, position {position}")
            stored.layer.pool.copy_(pool)


def poison_the_rest(kernels: AttentionKernels, shape: Shape) -> None:
    """All that follows a row, as in memory that others had."""
    case = make_case(shape)
    stored, query = store(kernels, case), new_queries(case)
    sound = kernels.attend(stored.layer, stored.batch, query, shape.params)
    spoiled = torch.zeros(len(query), dtype=torch.bool)
    for i, (context, new) in enumerate(shape.requests):
        for position in range(context - 1, context - new - 1, -1):
            spoil(stored, i, position, 0)
            spoil(stored, i, position, -1)
            spoiled |= rows_that_read(shape, i, position)
            output = kernels.attend(stored.layer, stored.batch, query, shape.params)
            check(output, sound, spoiled, f"request {i} from {position} on")
            sound = torch.where(spoiled[:, None, None], output, sound)
