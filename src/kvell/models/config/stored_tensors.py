"""Tensors as files have them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's place in its file, or in the data of its file.

    :param stop: the byte after its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start
