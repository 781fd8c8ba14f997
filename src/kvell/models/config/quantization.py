"""How weights may be kept, by the names of ``--quantization``; no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvell.errors import ChangeSomething

FLAG: Final = "--quantization"

QUANTIZATIONS: Final = ("none", "int8", "int4")
"""int8: a half-precision scale for each 32 numbers of a row.  int4: a scale and a minimum
likewise, head and tied embeddings in int8; blocks that a model brings are taken as they are."""


def require_quantization(name: str) -> None:
    """Make sure that there is such a way.

    :raises ChangeSomething: naming ``--quantization``.
    """
    if name not in QUANTIZATIONS:
        raise ChangeSomething(FLAG, name, "is not served", f"use one of {', '.join(QUANTIZATIONS)}")


def refusal(name: str, problem: str) -> ChangeSomething:
    """A model whose weights cannot be kept so."""
    return ChangeSomething(FLAG, name, problem, "leave it out")


@contextmanager
def unkept(name: str) -> Iterator[None]:
    """What packing refuses of a model's numbers is refused of the flag.

    :raises ChangeSomething: naming ``--quantization``.
    """
    try:
        yield
    except ValueError as error:
        raise refusal(name, f"cannot keep the model's numbers ({error})") from error
