"""Images sent with a request from another process; the store has them until the request ends."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.request_spec import SentTensor, to_token_bytes, to_token_ids
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import ImageStore, take_images
from kvell.vocabulary import RequestId

Attempt = tuple[RequestId, int]
"""A request and the number of its attempt: two attempts may overlap."""


@dataclass(frozen=True)
class Taken:
    """Stored images of a prompt.

    ``prompt`` (little-endian int32) and ``tensors`` are the processor's output as it was sent;
    ``image_prompt`` is the prompt with image ids, as the engine uses it.
    """

    prompt: bytes
    tensors: tuple[SentTensor, ...]
    image_prompt: ImagePrompt


class SentImages:
    """The images of requests in a store, until the requests end.

    :param store: None if the model takes only text.
    :param keeps_tensors: whether to keep the sent tensors, for requests that may move.
    """

    def __init__(self, store: ImageStore | None, *, keeps_tensors: bool = False) -> None:
        self.store, self._keeps_tensors = store, keeps_tensors
        self._taken: dict[Attempt, Taken] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, command: Submit) -> Submit:
        """Store a request's images, and return the request with image ids in their place.

        :raises ChangeSomething: if the model takes only text, or the images do not fit the prompt.
        """
        taken = self.read(command.spec.prompt, command.spec.tensors)
        self.keep((command.request_id, command.attempt), taken)
        ids = to_token_bytes(taken.image_prompt.token_ids)
        images = taken.image_prompt.images
        spec = structs.replace(command.spec, prompt=ids, images=images, tensors=())
        return replace(command, spec=spec)

    def read(self, prompt: bytes, tensors: tuple[SentTensor, ...]) -> Taken:
        """Store images, until they are released or kept for a request.

        :raises ChangeSomething: as :meth:`take`.
        """
        named = {tensor.name: tensor_of(tensor) for tensor in tensors}
        return Taken(prompt, tensors, take_images(self.store, to_token_ids(prompt), named))

    def keep(self, attempt: Attempt, taken: Taken) -> None:
        self._taken[attempt] = taken if self._keeps_tensors else replace(taken, tensors=())

    def of(self, attempt: Attempt) -> Taken | None:
        return self._taken.get(attempt)

    def release(self, taken: Taken) -> None:
        if self.store is not None:
            self.store.release(taken.image_prompt)

    def release_ended(self, events: Iterable[Event]) -> None:
        """Release the images of requests that have ended."""
        if self._taken:
            for event in events:
                if isinstance(event, Finished):
                    taken = self._taken.pop((event.request_id, event.attempt), None)
                    if taken is not None:
                        self.release(taken)


def tensor_of(sent: SentTensor) -> torch.Tensor:
    """Return the tensor, on the CPU.

    :raises ChangeSomething: if its bytes do not fit its type and shape.
    """
    sent.check()
    dtype: torch.dtype = getattr(torch, sent.dtype)
    flat = torch.frombuffer(bytearray(sent.data), dtype=dtype) if sent.data else torch.empty(0)
    return flat.to(dtype).reshape(sent.shape)


def to_sent(name: str, tensor: torch.Tensor) -> SentTensor:
    values = tensor.detach().cpu().contiguous()
    data = values.flatten().view(torch.uint8).numpy().tobytes() if values.numel() else b""
    kind = str(values.dtype).removeprefix("torch.")
    return SentTensor(name, kind, tuple(values.shape), data)
