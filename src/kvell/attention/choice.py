"""The choice of attention kernels for a device."""

import importlib.util
import logging
from collections.abc import Iterable, Sequence

import torch

from kvell.attention.checks import UNIT
from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels
from kvell.attention.quantised import SCALE_BYTES, is_quantised
from kvell.errors import ChangeSomething

logger = logging.getLogger(__name__)

_NAMES = "auto, native, triton, portable"
_HOMES = {"native": "cpu", "triton": "cuda"}
"""The type of device that each compiled kernel runs on."""


def choose_kernels(
    device: torch.device, name: str = "auto", num_threads: int = 0
) -> AttentionKernels:
    """Return the best kernels for a device, or the kernels called ``name``.

    :param name: ``auto`` (native on a CPU if it was compiled, triton on a GPU if it is
        installed, else portable), ``native``, ``triton`` or ``portable``.
    :raises ChangeSomething: if the name is unknown or cannot run here.
    """
    if name not in _NAMES.split(", "):
        raise ChangeSomething("attention", name, "no such kernels", f"choose one of {_NAMES}")
    if name == "portable":
        return PortableKernels()
    if name == "auto":
        return _best(device, num_threads)
    if device.type != _HOMES[name]:
        raise ChangeSomething("attention", name, f"does not run on {device}", "use portable")
    return _triton() if name == "triton" else _native(num_threads)


def kernels_for(
    kernels: AttentionKernels, sizes: Iterable[int], kv_dtype: torch.dtype
) -> AttentionKernels:
    """Return ``kernels`` if they support vectors of these sizes, else portable kernels.

    On a GPU the scale that follows a quantised vector must be aligned.

    :param sizes: lengths of a head's keys and values, in numbers.
    """
    aligned = SCALE_BYTES if is_quantised(kv_dtype) else 1
    unit = {"native": UNIT, "triton": aligned}.get(kernels.name, 1)
    return PortableKernels() if any(size % unit for size in sizes) else kernels


def _best(device: torch.device, num_threads: int) -> AttentionKernels:
    try:
        if device.type == "cpu":
            return _native(num_threads)
        if device.type == "cuda":
            return _triton()
    except ChangeSomething:
        pass
    return PortableKernels()


def _native(num_threads: int) -> AttentionKernels:
    try:
        from kvell.attention.native import NativeKernels, instruction_sets, processor_sets
    except ImportError as error:
        raise ChangeSomething(
            "attention", "native", "was not compiled", "install with a C++ compiler or use portable"
        ) from error
    warn_of_absent_form(processor_sets(), instruction_sets())
    return NativeKernels(num_threads=num_threads)


def warn_of_absent_form(processor_sets: Sequence[str], built_sets: Sequence[str]) -> None:
    """Log that this build has no kernels for the best instruction set of this processor.

    A build for one processor that is copied to another runs other kernels, which are slower.

    :param processor_sets: sets that this processor runs, best first.
    :param built_sets: sets of this processor that are compiled in, best first.
    """
    best = processor_sets[0]
    if best != built_sets[0]:
        logger.warning(
            "kernels: this processor runs %s, for which this build has none: %s is used, which is "
            "slower; run `make run` on this machine, or `make dev` for all processors",
            best,
            built_sets[0],
        )


def _triton() -> AttentionKernels:
    if importlib.util.find_spec("triton") is None:
        raise ChangeSomething(
            "attention", "triton", "is not installed", "pip install triton or use portable"
        )
    from kvell.attention.triton.backend import TritonKernels

    return TritonKernels()
