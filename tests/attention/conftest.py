"""Every implementation of the contract that this machine can run."""

from collections.abc import Sequence

import pytest

from kvell.attention.portable import PortableKernels
from kvell.attention.sections import SectionKernels


def implementations(threads: Sequence[int] = (1,)) -> list[SectionKernels]:
    """The torch kernels, then the compiled ones, best instruction set first."""
    found: list[SectionKernels] = [PortableKernels()]
    try:
        from kvell.attention.native import NativeKernels, instruction_sets
    except ImportError:  # installed without a compiler: the portable kernels are the product
        return found
    return found + [NativeKernels(n, name) for name in instruction_sets() for n in threads]


def label(kernels: SectionKernels) -> str:
    threads = getattr(kernels, "num_threads", 1)
    of_threads = f"-{threads}-threads" if threads > 1 else ""
    return f"{kernels.name}-{getattr(kernels, 'instruction_set', 'torch')}{of_threads}"


@pytest.fixture(params=implementations(), ids=label)
def kernels(request: pytest.FixtureRequest) -> SectionKernels:
    """One implementation after the other."""
    found: SectionKernels = request.param
    return found
