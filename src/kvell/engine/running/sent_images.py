"""Images that came with a request from another process; the store has them until it ends."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.tensors import SentTensor
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import ImageStore, take_images
from kvell.vocabulary import RequestId


class SentImages:
    """Takes the images of requests into a store, and releases them with their ends.

    :param store: None if the model takes text only.
    """

    def __init__(self, store: ImageStore | None) -> None:
        self._store = store
        self._taken: dict[RequestId, ImagePrompt] = {}

    def take(self, command: Submit) -> Submit:
        """The request as the engine knows it: its images in the store, ids in their place.

        :raises ChangeSomething: if the model takes text only, or they do not fit the prompt.
        """
        tensors = {one.name: tensor_of(one) for one in command.tensors}
        ids = np.frombuffer(command.prompt, "<i4").astype(np.int32)
        prompt = take_images(self._store, ids, tensors)
        self._taken[command.request_id] = prompt  # no id comes twice: the gate refuses it
        told = prompt.token_ids.astype("<i4").tobytes()
        return replace(command, prompt=told, images=prompt.images, tensors=())

    def told(self, events: Iterable[Event]) -> None:
        """Release the images of requests that are over."""
        if self._taken:
            for event in events:
                if isinstance(event, Finished) and event.request_id in self._taken:
                    self._release(self._taken.pop(event.request_id))

    def _release(self, prompt: ImagePrompt) -> None:
        if self._store is not None:
            self._store.release(prompt)


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
