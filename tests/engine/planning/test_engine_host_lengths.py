"""Which of a step's metadata goes to a GPU, and which stays on the host."""

import dataclasses

import numpy as np
import torch

from kvell.attention.host_batch import HostGroupBatch
from kvell.attention.interface import GroupBatch, HostLengths, part_sizes
from kvell.attention.native import batch_args
from kvell.engine.running.batching import FIELDS, GroupArrays
from kvell.engine.running.forward_batches import to_device

LENGTHS = [field.name for field in dataclasses.fields(HostLengths)]


def arrays() -> GroupArrays:
    """Two requests, three pages, five tokens; all numbers differ."""
    sizes, numbers = part_sizes(2, 3, 5), iter(range(100))
    parts = [np.asarray([next(numbers) for _ in range(n)], np.int32) for n in sizes]
    return GroupArrays.of(parts, np.int32)


def test_on_a_cpu_nothing_is_kept_twice() -> None:
    batch = to_device(arrays(), torch.device("cpu"))
    assert batch.host is None
    assert batch.page_ids.tolist() == arrays().page_ids.tolist()


def test_lengths_stay_on_the_host_beside_a_device() -> None:
    """``meta`` stands for a GPU: a device whose memory the host cannot read."""
    batch = to_device(arrays(), torch.device("meta"))
    tensors = {name: getattr(batch, name) for name in FIELDS}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    assert batch.host is not None
    for name in LENGTHS:
        assert getattr(batch.host, name).tolist() == getattr(arrays(), name).tolist()


def test_parts_of_one_tensor_are_where_compiled_kernels_look() -> None:
    """They lie as in a batch that was not split."""
    batch = to_device(arrays(), torch.device("cpu"))
    parts = [getattr(batch, name) for name in FIELDS]
    assert batch_args(batch, 5) == batch_args(GroupBatch(*parts), 5)
    assert isinstance(batch, HostGroupBatch)
    assert batch.writes == (batch.write_page_ids.data_ptr(), batch.write_offsets.data_ptr())


def test_lengths_are_named_as_in_the_batch() -> None:
    assert set(LENGTHS) <= {field.name for field in dataclasses.fields(GroupBatch)}
