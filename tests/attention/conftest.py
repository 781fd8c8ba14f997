"""Every implementation of the contract that this machine can run."""

from collections.abc import Sequence

import pytest
from _pytest.mark.structures import ParameterSet

from kvell.attention.portable import PortableKernels
from kvell.attention.sections import SectionKernels

try:
    from kvell.attention.native import NativeKernels, instruction_sets
except ImportError:  # installed without a compiler: the portable kernels are the product
    SETS: list[str] = []
else:
    SETS = instruction_sets()


def implementations(threads: Sequence[int] = (1,)) -> list[SectionKernels]:
    """The torch kernels, then the compiled ones, best instruction set first."""
    return [PortableKernels(), *(NativeKernels(n, name) for name in SETS for n in threads)]


def each(threads: Sequence[int] = (1,)) -> list[ParameterSet]:
    """All of them as parameters; sets between the best and the portable one are long."""
    return [
        pytest.param(kernels, id=label(kernels), marks=marks_of(set_of(kernels)))
        for kernels in implementations(threads)
    ]


def each_set() -> list[ParameterSet]:
    """Instruction sets as parameters; those between the best and the portable one are long."""
    return [pytest.param(name, marks=marks_of(name)) for name in SETS]


def marks_of(instruction_set: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if instruction_set in SETS[1:-1] else []


def set_of(kernels: SectionKernels) -> str:
    return str(getattr(kernels, "instruction_set", "torch"))


def label(kernels: SectionKernels) -> str:
    threads = getattr(kernels, "num_threads", 1)
    of_threads = f"-{threads}-threads" if threads > 1 else ""
    return f"{kernels.name}-{set_of(kernels)}{of_threads}"


@pytest.fixture(params=each())
def kernels(request: pytest.FixtureRequest) -> SectionKernels:
    found: SectionKernels = request.param
    return found
