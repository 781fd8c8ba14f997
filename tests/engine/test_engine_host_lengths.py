"""What of a step's metadata goes to a GPU, and what stays at hand."""

import dataclasses

import numpy as np
import torch

from kvell.attention.interface import GroupBatch, HostLengths
from kvell.engine.batching import GroupArrays
from kvell.engine.forward_batches import _to_device

LENGTHS = [field.name for field in dataclasses.fields(HostLengths)]


def arrays() -> GroupArrays:
    names = [field.name for field in dataclasses.fields(GroupArrays)]
    return GroupArrays(**{name: np.arange(i + 1, dtype=np.int32) for i, name in enumerate(names)})


def test_on_a_cpu_nothing_is_kept_twice() -> None:
    batch = _to_device(arrays(), torch.device("cpu"))
    assert batch.host is None
    assert batch.page_ids.tolist() == arrays().page_ids.tolist()


def test_lengths_stay_on_the_host_beside_a_device() -> None:
    """``meta`` stands for a GPU: a device whose memory the host cannot read."""
    batch = _to_device(arrays(), torch.device("meta"))
    tensors = {name: value for name, value in vars(batch).items() if name != "host"}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.int32}
    assert batch.host is not None
    for name in LENGTHS:
        assert getattr(batch.host, name).tolist() == getattr(arrays(), name).tolist()


def test_lengths_are_named_as_in_the_batch() -> None:
    assert set(LENGTHS) <= {field.name for field in dataclasses.fields(GroupBatch)}
