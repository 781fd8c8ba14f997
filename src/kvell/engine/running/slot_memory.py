"""The activation range as a tensor, and the slot in it for a step's passes."""

from collections.abc import Sequence

import torch

from kvell.engine.requests.plan import StepSlot
from kvell.models.fused.decoder import FusedDecoder


class SlotMemory:
    """The setter of fused passes' memory to granted slots; it maps and grants nothing.

    :param area: uint8 [bytes of the range]; only granted slots may be touched.
    :param decoders: fused passes that compute in a slot, one after the other.
    """

    def __init__(
        self, area: torch.Tensor, chunk_bytes: int, decoders: Sequence[FusedDecoder]
    ) -> None:
        self._area, self._chunk_bytes, self._decoders = area, chunk_bytes, decoders

    def use(self, slot: StepSlot) -> None:
        begin = slot.start * self._chunk_bytes
        memory = self._area[begin : begin + slot.num_chunks * self._chunk_bytes]
        for decoder in self._decoders:
            decoder.use_memory(memory)
