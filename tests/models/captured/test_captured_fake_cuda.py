"""Decode steps of all families on a GPU without numbers: nothing waits, all is on the device."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from kvell.attention.interface import AttendParams, GroupBatch, LayerPages, Partial
from kvell.memory import plan_layout
from kvell.models.captured.device_step import DeviceMemory, Forward, batch_of, compute
from kvell.models.captured.slots import SlotLimits, places_of, spare_pages
from kvell.models.config.description import describe
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models import harness
from tests.models.captured.families import FAMILIES
from tests.models.captured.tape import NotRepeatableError, Tape, recorded
from tests.models.cases import long_unless
from tests.models.harness import tiny_module

DEVICE = torch.device("cuda:0")
aten = torch.ops.aten
CASTS = {
    torch.Tensor.bool: torch.bool,
    torch.Tensor.float: torch.float32,
    torch.Tensor.long: torch.int64,
    torch.Tensor.int: torch.int32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


class _Indexing(TorchFunctionMode):
    """Indexing and casts by operations: torch's own want a driver that a CPU's build lacks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _taken(*args)
        if func is torch.Tensor.__setitem__:
            return _put(*args)
        if func is torch.Tensor.__invert__:
            return aten.bitwise_not(args[0])
        if func in CASTS:
            return args[0].to(CASTS[func])
        return func(*args, **(kwargs or {}))


def _taken(x: torch.Tensor, key: Any) -> torch.Tensor:
    keys, dim = key if isinstance(key, tuple) else (key,), 0
    for at, one in enumerate(keys):
        if one is Ellipsis:
            dim = x.dim() - sum(other is not None for other in keys[at + 1 :])
        elif one is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(one, int):
            x = x.select(dim, one)
        elif isinstance(one, slice):
            x = aten.slice.Tensor(x, dim, one.start, one.stop, one.step or 1)
            dim += 1
        else:
            if not isinstance(one, torch.Tensor) or one.device != x.device:
                raise AssertionError(f"a tensor on {x.device} is indexed by {one!r}")
            if one.dtype == torch.bool:
                raise AssertionError(f"{tuple(x.shape)} is indexed by a mask: data decides a shape")
            x = aten.index.Tensor(x, [None] * dim + [one])
            dim += one.dim()
    return x


def _put(x: torch.Tensor, key: Any, value: Any) -> None:
    if isinstance(key, torch.Tensor):
        assert key.device == x.device == value.device
        aten.index_put_(x, [key], value)
    elif isinstance(value, torch.Tensor):
        aten.copy_(_taken(x, key), value)
    else:
        _taken(x, key).fill_(value)


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Everything made on :data:`DEVICE` in here is fake; it says that it is an H100."""
    hopper = patch("torch.cuda.get_device_capability", return_value=(9, 0))
    with hopper, FakeTensorMode() as mode, _Indexing():
        yield mode


def on_device(module: torch.nn.Module) -> None:
    """Give a module of the meta device fake parameters and buffers; within :func:`fake_cuda`."""
    for child in module.modules():
        for name, old in list(child.named_parameters(recurse=False)):
            made = torch.empty(old.shape, dtype=old.dtype, device=DEVICE)
            setattr(child, name, torch.nn.Parameter(made, requires_grad=False))
        for name, kept in list(child._buffers.items()):
            if kept is not None:
                child._buffers[name] = torch.empty(kept.shape, dtype=kept.dtype, device=DEVICE)


class FakeLaunches:
    """Kernels that check what a launch gets, and compute nothing."""

    name = "fake"

    def __init__(self) -> None:
        self.launches = 0

    def write_kv(
        self, layer: LayerPages, batch: GroupBatch, key: torch.Tensor, value: torch.Tensor | None
    ) -> None:
        self._check(layer, batch, key, *(() if value is None else (value,)))

    def attend(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> torch.Tensor:
        self._check(layer, batch, query)
        if params.sinks is not None:
            assert params.sinks.device == DEVICE
        return query.new_empty((*query.shape[:2], layer.output_size))

    def attend_partial(
        self, layer: LayerPages, batch: GroupBatch, query: torch.Tensor, params: AttendParams
    ) -> Partial:
        output = self.attend(layer, batch, query, params).float()
        return Partial(output, output[..., 0], output[..., 0])

    def _check(self, layer: LayerPages, batch: GroupBatch, *rows: torch.Tensor) -> None:
        self.launches += 1
        tables = (
            batch.query_starts, batch.context_lens, batch.table_starts, batch.page_ids,
            batch.first_positions, batch.write_page_ids, batch.write_offsets,
        )  # fmt: skip
        for table in tables:
            assert (table.device, table.dtype) == (DEVICE, torch.int32)
            assert table.is_contiguous()
        assert layer.pool.device == DEVICE
        for row in rows:
            assert row.device == DEVICE and row.stride(-1) == 1
            assert len(row) == len(batch.write_page_ids)


def moved(value: Any) -> Any:
    """Return a batch with fake tensors of the device for all of its tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for item in fields(value):
            object.__setattr__(made, item.name, moved(getattr(value, item.name)))
        return made
    return value


ROWS = 32


def decode_tape(
    make: Callable[[], Any], spoil: Callable[[Forward], Forward] = lambda forward: forward
) -> tuple[Tape, int]:
    """Run a bfloat16 model's decode step of ``ROWS`` rows; return its tape and its launches.

    :param make: makes the module; it runs on the meta device.
    :param spoil: wraps the model's pass.
    """
    with torch.device("meta"):
        module = make().eval()
    description = describe(module.config, 2)
    layout = plan_layout(description.layers, 64 * MIB)
    size_bytes = layout.pool_bytes + layout.large_page_bytes
    spares = spare_pages(
        layout.groups, torch.empty(size_bytes, dtype=torch.uint8), layout.pool_bytes
    )
    places = places_of(ROWS, layout.groups, spares, SlotLimits(ROWS, 4096, 512, 4096))
    on_host = DeviceMemory.zeros(places.size, ROWS, torch.device("cpu"))
    batch = batch_of(on_host, places)
    with fake_cuda():
        on_device(module)
        kernels = FakeLaunches()
        model = PagedModel(module, description, kernels, torch.bfloat16)
        model.attach(layout, torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE))
        memory, there = moved((on_host, batch))
        forward = spoil(model.forward)
        tape, _ = recorded(lambda: compute(memory, places, there, forward))
    return tape, kernels.launches


SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128},
}

COMPUTED = "Gemma3nForCausalLM"
"""Its modules copy a number from the host in each step, which no record repeats: a server that
cannot record a model computes its steps."""


def tiny(architecture: str) -> Callable[[], Any]:
    """Makes a tiny model of a family, in bfloat16; on the meta device it has no numbers."""
    module = tiny_module(architecture)
    config = copy.deepcopy(module.config)  # a paged model changes it
    return lambda: type(module)._from_config(config, dtype=torch.bfloat16)


def llama(shape: str) -> Any:
    """A Llama of a real width, with fewer layers."""
    config = LlamaConfig(
        vocab_size=128_256, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, **SHAPES[shape],
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=long_unless(name in FAMILIES))
        for name in sorted(set(harness.FAMILIES) - {COMPUTED})
    ],
)
def test_a_decode_step_waits_for_nothing(architecture: str) -> None:
    tape, _ = decode_tape(tiny(architecture))
    assert len(tape.lines) > 50


@pytest.mark.long
def test_a_family_that_no_gpu_records() -> None:
    with pytest.raises(NotRepeatableError, match="made of Python's numbers"):
        decode_tape(tiny(COMPUTED))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_real_widths(shape: str) -> None:
    tape, launches = decode_tape(lambda: llama(shape))
    assert launches == 2 * 2, "each layer writes and attends"
    assert not any("cpu" in line for line in tape.lines)


def waits(forward: Forward) -> Forward:
    return lambda batch: forward(batch) * batch.positions[0].item()


def lists(forward: Forward) -> Forward:
    return lambda batch: forward(batch) * sum(batch.positions.tolist())


def reads_arrays(forward: Forward) -> Forward:
    return lambda batch: forward(batch) * float(batch.positions.cpu().numpy().sum())


def mixes(forward: Forward) -> Forward:
    return lambda batch: forward(batch) + torch.ones(1, 509)


def selects(forward: Forward) -> Forward:
    return lambda batch: forward(batch)[batch.positions > 3]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (waits, "_local_scalar_dense"),
        (lists, "_local_scalar_dense|tolist"),
        (reads_arrays, "numpy|aten._to_copy"),
        (mixes, "device"),
        (selects, "nonzero|indexed by"),
    ],
)
def test_what_waits_or_mixes_devices_is_caught(
    spoil: Callable[[Forward], Forward], told: str
) -> None:
    with pytest.raises(Exception, match=told):
        decode_tape(tiny("LlamaForCausalLM"), spoil)
