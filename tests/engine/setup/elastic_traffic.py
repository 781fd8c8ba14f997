"""Sizes and faults of a device in small chunks."""

from kvell.device.chunks import AddressRange, Ints
from kvell.errors import TryLater
from tests.device.fake_chunks import FakeChunks

MORE_LARGE = 8


"""Extra large pages for activations, beyond those of the plain machine."""

TOKENS_A_CHUNK = 8


class Refusing(FakeChunks):
    """Refuses one mapping in ``every``, and as often unmaps only half.

    :ivar every: 0 refuses nothing.
    """

    every = 0
    counted = 0

    def refuses(self) -> bool:
        self.counted += 1
        return self.every > 0 and self.counted % self.every == 0

    def map(self, area: AddressRange, positions: Ints, chunks: Ints) -> None:
        if self.refuses():
            raise TryLater("device: injected failure (map)")
        super().map(area, positions, chunks)

    def unmap(self, area: AddressRange, positions: Ints) -> int:
        return super().unmap(
            area, positions[: len(positions) // 2] if self.refuses() else positions
        )
