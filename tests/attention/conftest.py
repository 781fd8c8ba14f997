"""Every implementation of the contract that this machine can run."""

import pytest

from kvell.attention.interface import AttentionKernels
from kvell.attention.portable import PortableKernels


def implementations() -> list[AttentionKernels]:
    """The torch kernels, then the compiled ones, best instruction set first."""
    found: list[AttentionKernels] = [PortableKernels()]
    try:
        from kvell.attention.native import NativeKernels, instruction_sets
    except ImportError:  # installed without a compiler: the portable kernels are the product
        return found
    return found + [NativeKernels(1, name) for name in instruction_sets()]


def _label(kernels: AttentionKernels) -> str:
    return f"{kernels.name}-{getattr(kernels, 'instruction_set', 'torch')}"


@pytest.fixture(params=implementations(), ids=_label)
def kernels(request: pytest.FixtureRequest) -> AttentionKernels:
    """One implementation after the other."""
    found: AttentionKernels = request.param
    return found
