"""Types of the compiled module (csrc/packing/module.cpp)."""

def pack_rows(
    addresses: int,
    count: int,
    width: int,
    items: int,
    source: int,
    target: int,
    out: int,
    threads: int,
) -> None: ...
