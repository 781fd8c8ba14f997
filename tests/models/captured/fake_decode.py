"""A decode step on a GPU without numbers, as it would be recorded."""

from collections.abc import Callable
from typing import Any

import torch

from kvell.memory import plan_layout
from kvell.models.captured.device_step import DeviceMemory, batch_of, compute
from kvell.models.captured.slots import SlotLimits, places_of, spare_pages
from kvell.models.config.description import describe
from kvell.models.paged_model import PagedModel
from kvell.vocabulary import MIB
from tests.models.captured.fake_cuda import DEVICE, FakeLaunches, fake_cuda, moved, on_device
from tests.models.captured.tape import Tape, recorded

ROWS = 32


def decode_tape(make: Callable[[], Any]) -> tuple[Tape, int]:
    """Run a bfloat16 model's decode step of ``ROWS`` rows; return its tape and its launches.

    :param make: makes the module; it runs on the meta device.
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
        tape, _ = recorded(lambda: compute(memory, places, there, model.forward))
    return tape, kernels.launches
