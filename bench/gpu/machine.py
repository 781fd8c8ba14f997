"""What the machine is, the most that it gives, and what each call costs its host."""

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import torch
import triton

from bench.gpu.copying import copy_runs
from bench.gpu.place import Place
from bench.gpu.report import Row, figures
from bench.gpu.sizes import sizes_of
from bench.gpu.speed import make_step
from bench.gpu.timing import copy_bandwidth, host_seconds, product_rate, read_bandwidth, timed


def rows(pretends: bool, part: int, of: int) -> Iterator[Row]:
    """Yield the machine, its limits, and its host's costs."""
    place, sizes = Place.of(pretends), sizes_of(pretends)
    yield {"kind": "machine"} | machine(place)
    yield figures("memory", partial(memory, place, sizes.memory_bytes))
    yield figures("product", partial(product, place, sizes.product))
    for name, make in HOST_CALLS.items():
        yield figures(name, partial(host, place, name, make))
    yield figures("copy to the end", partial(copy_to_the_end, place))


def memory(place: Place, size_bytes: int) -> Row:
    """Return bytes per second of a copy on the device, and of reading."""
    copied, read = copy_bandwidth(place, size_bytes), read_bandwidth(place, size_bytes)
    return {"kind": "memory", "copy": copied, "read": read}


def product(place: Place, size: int) -> Row:
    """Return FLOP per second of a product of square matrices."""
    return {"kind": "product", "size": size, "flops_per_second": product_rate(place, size)}


def host(place: Place, name: str, make: Callable[[Place], Callable[[], object]]) -> Row:
    """Return how long a call keeps the host."""
    seconds = host_seconds(place, make(place))
    return {"kind": "host", "call": name, "microseconds": seconds * 1e6}


def copy_to_the_end(place: Place) -> Row:
    """Return how long a copy to the device takes it."""
    seconds = timed(place, [from_host(place)]).median
    name = "copy of 64 KiB from pinned memory, until it is done"
    return {"kind": "host", "call": name, "microseconds": seconds * 1e6}


def machine(place: Place) -> dict[str, str | bool]:
    """Return names and versions; ``compiled`` says whether Kvell's compiled parts are there."""
    return {
        "gpu": "none" if place.pretends else torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "compiled": find_spec("kvell.engine.running._tables") is not None,
    }


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or "unknown"."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


def operation(place: Place) -> Callable[[], object]:
    """Return an operation of torch that has next to nothing to do."""
    small = torch.zeros(1024, device=place.device)
    return lambda: small.add_(1)


def attention(place: Place) -> Callable[[], object]:
    """Return a decode's attention of one short request."""
    heads = sizes_of(place.pretends).decodes[0][0]
    [attend] = make_step(place, heads, 1, 16, 1, layers=1).calls(place.kernels())
    return attend


def launch(place: Place) -> Callable[[], object]:
    """Return the launch of a kernel that has next to nothing to do."""
    target, source, starts = torch.zeros(3, 64, dtype=torch.int64, device=place.device).unbind()

    def call() -> None:
        copy_runs[(1, 1)](target, source, starts, starts, 8, BLOCK=64)

    return call


def from_host(place: Place) -> Callable[[], object]:
    """Return a copy from pinned memory that the host does not wait for."""
    source = place.pinned(64 << 10)
    target = torch.empty_like(source, device=place.device)
    return lambda: target.copy_(source, non_blocking=True)


def to_host(place: Place) -> Callable[[], object]:
    """Return a copy of a step's few numbers to pinned memory, with the wait for its event."""
    target = place.pinned(128)
    source = torch.zeros(128, dtype=torch.uint8, device=place.device)
    event = None if place.pretends else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def call() -> None:
        target.copy_(source, non_blocking=True)
        if event is not None:
            event.record()
            event.synchronize()

    return call


HOST_CALLS: dict[str, Callable[[Place], Callable[[], object]]] = {
    "torch operation": operation,
    "Triton launch": launch,
    "attention of a layer": attention,
    "copy of 64 KiB from pinned memory": from_host,
    "copy of 128 B to pinned memory, and the wait for it": to_host,
}
"""Calls whose time on the host is what a step of an engine pays for each of them."""
