"""A step's batch in the compiled pass's form."""

import numpy as np

from kvell.attention.host_batch import HostGroupBatch, HostRows
from kvell.attention.interface import GroupBatch
from kvell.attention.states import StateBatch
from kvell.models.forward.forward_batch import ForwardBatch, HostForwardBatch
from kvell.models.fused.states import batch_args as state_batch_args


def group_args(
    group: object, tokens: int
) -> tuple[tuple[int, int, int, int, int, int, int, int], int, int]:
    """Return metadata of a group of keys and values, and the places of the new tokens.

    :raises RuntimeError: if the step has none, or of another kind.
    """
    if isinstance(group, HostGroupBatch):
        return ((*group.args, tokens), *group.writes)
    if not isinstance(group, GroupBatch):
        raise RuntimeError("the step has no metadata for a group of keys and values")
    from kvell.attention.native import batch_args

    writes = (group.write_page_ids.data_ptr(), group.write_offsets.data_ptr())
    return (batch_args(group, tokens), *writes)


def states_args(group: object) -> tuple[tuple[int, int, int], list[int]]:
    """Return metadata of a group of states.

    :raises RuntimeError: if the step has none, or of another kind.
    """
    if not isinstance(group, StateBatch):
        raise RuntimeError("the step has no metadata for a group of states")
    return state_batch_args(group)


def host_rows(batch: ForwardBatch) -> HostRows:
    """Return a step's tokens, positions and logits rows, in one array."""
    if isinstance(batch, HostForwardBatch):
        return batch.rows
    parts = (batch.token_ids, batch.positions, batch.logits_rows)
    return HostRows.of([part.numpy() for part in parts], np.int64)
