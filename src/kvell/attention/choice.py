"""Which kernels run on which device."""

import torch

from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.errors import ChangeSomething

_NAMES = "auto, native, portable"


def choose_kernels(
    device: torch.device, name: str = "auto", num_threads: int = 0
) -> AttentionKernels:
    """The best kernels for a device, or the ones asked for by name.

    :param name: ``auto`` (native on a CPU if it was compiled, else portable),
        ``native`` or ``portable``.
    :param num_threads: threads of the native kernels; 0 for torch's number.
    :raises ChangeSomething: if the name is unknown or cannot run here.
    """
    if name not in _NAMES.split(", "):
        raise ChangeSomething("attention", name, "no such kernels", f"choose one of {_NAMES}")
    if name == "portable" or (name == "auto" and device.type != "cpu"):
        return PortableKernels()
    if device.type != "cpu":
        raise ChangeSomething("attention", name, f"does not run on {device}", "use portable")
    return _native(num_threads) if name == "native" else _native_or_portable(num_threads)


def _native(num_threads: int) -> AttentionKernels:
    try:
        from kvell.attention.native import NativeKernels
    except ImportError as error:
        raise ChangeSomething(
            "attention", "native", "was not compiled", "install with a C++ compiler or use portable"
        ) from error
    return NativeKernels(num_threads=num_threads)


def _native_or_portable(num_threads: int) -> AttentionKernels:
    try:
        return _native(num_threads)
    except ChangeSomething:
        return PortableKernels()
