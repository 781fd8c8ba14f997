"""Ways to store weights, by the names of ``--quantization``; no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvell.errors import ChangeSomething

FLAG: Final = "--quantization"

QUANTIZATIONS: Final = ("none", "int8", "int4")
"""int8: a half-precision scale for each 32 numbers of a row.  int4: a scale and a minimum for
each, with head and tied embeddings in int8; GGUF blocks of a model are used unchanged."""


def require_quantization(name: str) -> None:
    """Raise unless a name of ``--quantization`` is known.

    :raises ChangeSomething: naming ``--quantization``.
    """
    if name not in QUANTIZATIONS:
        raise ChangeSomething(FLAG, name, "is not served", f"use one of {', '.join(QUANTIZATIONS)}")


def refusal(name: str, problem: str) -> ChangeSomething:
    return ChangeSomething(FLAG, name, problem, "leave it out")


@contextmanager
def unkept(name: str) -> Iterator[None]:
    """Turn a ``ValueError`` of packing into an error about the flag.

    :raises ChangeSomething: naming ``--quantization``.
    """
    try:
        yield
    except ValueError as error:
        problem = f"cannot represent the model's numbers ({error})"
        if name == "none":
            raise ChangeSomething("model", "weights", problem, "fetch the model again") from error
        raise refusal(name, problem) from error
