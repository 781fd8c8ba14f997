"""Images that came with a request from another process; the store has them until it ends."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.tensors import SentTensor
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import ImageStore, take_images
from kvell.vocabulary import RequestId

Attempt = tuple[RequestId, int]
"""A request and which attempt at it: an earlier one may still end while a later one begins."""


@dataclass(frozen=True)
class Taken:
    """Images in the store.

    :param prompt: the ids that the processor gave, as little-endian int32, and its ``tensors``.
    :param told: the prompt as the engine knows it.
    """

    prompt: bytes
    tensors: tuple[SentTensor, ...]
    told: ImagePrompt


class SentImages:
    """Takes the images of requests into a store, and releases them with their ends.

    :param store: None if the model takes text only.
    :param keeps_tensors: as they came, for requests that may move to other instances.
    """

    def __init__(self, store: ImageStore | None, *, keeps_tensors: bool = False) -> None:
        self.store, self._keeps_tensors = store, keeps_tensors
        self._taken: dict[Attempt, Taken] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, command: Submit) -> Submit:
        """The request as the engine knows it: its images in the store, ids in their place.

        :raises ChangeSomething: if the model takes text only, or they do not fit the prompt.
        """
        taken = self.read(command.prompt, command.tensors)
        self.keep((command.request_id, command.attempt), taken)
        ids = taken.told.token_ids.astype("<i4").tobytes()
        return replace(command, prompt=ids, images=taken.told.images, tensors=())

    def read(self, prompt: bytes, tensors: tuple[SentTensor, ...]) -> Taken:
        """Images in the store, until they are released or kept for a request.

        :raises ChangeSomething: as :meth:`take`.
        """
        named = {one.name: tensor_of(one) for one in tensors}
        ids = np.frombuffer(prompt, "<i4").astype(np.int32)
        return Taken(prompt, tensors, take_images(self.store, ids, named))

    def keep(self, attempt: Attempt, taken: Taken) -> None:
        """Images are those of a request, and released when it ends."""
        self._taken[attempt] = taken if self._keeps_tensors else replace(taken, tensors=())

    def of(self, attempt: Attempt) -> Taken | None:
        """The images that came with a request which has not ended."""
        return self._taken.get(attempt)

    def release(self, taken: Taken) -> None:
        """Nobody needs these images any more."""
        if self.store is not None:
            self.store.release(taken.told)

    def told(self, events: Iterable[Event]) -> None:
        """Release the images of requests that are over."""
        if self._taken:
            for event in events:
                if isinstance(event, Finished):
                    taken = self._taken.pop((event.request_id, event.attempt), None)
                    if taken is not None:
                        self.release(taken)


def tensor_of(sent: SentTensor) -> torch.Tensor:
    """The tensor, on the CPU.

    :raises ChangeSomething: if its bytes do not fit its type and shape.
    """
    sent.check()
    dtype: torch.dtype = getattr(torch, sent.dtype)
    flat = torch.frombuffer(bytearray(sent.data), dtype=dtype) if sent.data else torch.empty(0)
    return flat.to(dtype).reshape(sent.shape)


def sent(name: str, tensor: torch.Tensor) -> SentTensor:
    """A tensor ready to be sent."""
    values = tensor.detach().cpu().contiguous()
    data = values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    kind = str(values.dtype).removeprefix("torch.")
    return SentTensor(name, kind, tuple(values.shape), data)
