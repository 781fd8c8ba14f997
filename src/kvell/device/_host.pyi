"""Chunks of a memfd, mapped in batches (csrc/device); :mod:`kvell.device.portable` is its twin.

Arrays are addresses of int32 values.  Every call answers how far it came, from the front, and
the errno that ended it, 0 if none did.
"""

def reserve(size_bytes: int, alignment: int) -> tuple[int, int]: ...
def release(address: int, size_bytes: int) -> int: ...
def map_chunks(
    address: int,
    descriptor: int,
    chunk_bytes: int,
    positions: int,
    chunks: int,
    count: int,
    populate: bool,
) -> tuple[int, int]: ...
def unmap_chunks(address: int, chunk_bytes: int, positions: int, count: int) -> tuple[int, int]: ...
def commit_chunks(
    address: int, chunk_bytes: int, positions: int, count: int
) -> tuple[int, int, int]: ...
