"""Storage types of keys and values, by the names of ``--kv-cache-dtype``; no torch."""

from dataclasses import dataclass

from kvell.errors import ChangeSomething


@dataclass(frozen=True)
class KvDtype:
    """One way to store a number of a key or value.

    :param scale_bytes: bytes of the scale of each vector of quantised numbers.
    """

    element_bytes: int
    scale_bytes: int = 0


KV_DTYPES = {
    "float32": KvDtype(4),
    "bfloat16": KvDtype(2),
    "fp8": KvDtype(1, 4),
    "int8": KvDtype(1, 4),
}
"""fp8 is e4m3; it and int8 have a float32 scale for each token and head."""

ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4}
"""The bytes of one number of weights and activations by ``--dtype``."""


def kv_dtype_named(name: str, dtype: str) -> str:
    """Resolve a name of ``--kv-cache-dtype``; ``auto`` means the model's own dtype.

    :param dtype: the model's: ``float32``; ``bfloat16`` and ``auto`` both mean bfloat16.
    :raises ChangeSomething: if the name is unknown.
    """
    if name == "auto":
        return "float32" if dtype == "float32" else "bfloat16"
    if name not in KV_DTYPES:
        choices = ", ".join(("auto", *KV_DTYPES))
        raise ChangeSomething("--kv-cache-dtype", name, "is not served", f"use one of {choices}")
    return name
