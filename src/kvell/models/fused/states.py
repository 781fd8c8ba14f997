"""States of mixers in the compiled pass's form: their memory, and a step's metadata."""

import torch

from kvell.attention.checks import int32_pointer
from kvell.attention.host_batch import HostStateBatch
from kvell.attention.states import StateBatch
from kvell.models.states.state_pages import StatePages

Rows = tuple[int, int, int]
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}


def state_args(pages: StatePages, group: int) -> tuple[Rows, Rows, int, int, int]:
    """Return a layer's memory of states, and the index of its metadata.

    :param group: index of the layer's metadata among a step's metadata of states.
    :raises ValueError: if the compiled pass does not support the dtype of the states.
    """
    assert pages.recurrent is not None, "a mixer has a recurrent state"
    count = pages.window.shape[0]
    return _rows(pages.window), _rows(pages.recurrent), count, pages.part, group


def batch_args(batch: StateBatch) -> tuple[tuple[int, int, int], list[int]]:
    """Return a step's metadata of a group of states, in the compiled pass's form.

    :raises ValueError: if its parts disagree in length, or are not int32 in host memory.
    """
    if isinstance(batch, HostStateBatch):
        return batch.args
    requests, slices = batch.page_ids.shape
    cuts = batch.cut_requests.shape[0]
    ends = batch.end_page_ids
    if batch.query_starts.shape[0] != requests + 1 or batch.starts.shape[0] != requests:
        raise ValueError(f"states: starts are not those of {requests} requests")
    if batch.cut_tokens.shape[0] != cuts or batch.cut_page_ids.shape != (cuts, slices):
        raise ValueError(f"states: {cuts} cuts need as many tokens, and {slices} pages each")
    if ends is not None and ends.shape != (requests, slices):
        raise ValueError(f"states: {requests} requests end in {slices} pages each")
    tables = {
        "query_starts": batch.query_starts,
        "starts": batch.starts,
        "page_ids": batch.page_ids,
        "cut_requests": batch.cut_requests,
        "cut_tokens": batch.cut_tokens,
        "cut_page_ids": batch.cut_page_ids,
    }
    pointers = [int32_pointer(name, table) for name, table in tables.items()]
    pointers.append(0 if ends is None else int32_pointer("end_page_ids", ends))
    return (requests, cuts, slices), pointers


def _rows(rows: torch.Tensor) -> Rows:
    if rows.dtype not in _ELEMENTS:
        raise ValueError(f"states of {rows.dtype} are not served by the compiled pass")
    return rows.data_ptr(), rows.stride(0) * rows.itemsize, _ELEMENTS[rows.dtype]
