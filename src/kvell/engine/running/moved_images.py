"""Images in the messages between instances.

::

    Prepare, Ask ──outgoing──► with the contents of its image ids, and with the tensors of a
                               request that moves
    ──incoming──► checked: the ids have the same contents here; the store has the tensors until
                  the request ends, or its transfer is abandoned

An image id is a short hash of the content.  If two contents collide, the id belongs to the first.
So an instance compares the contents of image ids before it sends or receives a page of their text.
The engine's core sees neither contents nor tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from kvell.engine.protocol.messages import Event, Finished, Submit
from kvell.engine.protocol.request_spec import SentTensor, to_token_bytes, to_token_ids
from kvell.errors import ChangeSomething
from kvell.mempool.agent import Agent
from kvell.mempool.entries import Heard, PeerEntry
from kvell.mempool.transfers.actions import Action, Send
from kvell.mempool.transfers.messages import Abandon, Ask, Declined, Prepare, Prepared, Transfer
from kvell.models.images.image_content import ImagePrompt
from kvell.models.images.image_store import ImageStore, take_images
from kvell.vocabulary import RequestId
from kvell.wire.decoding import MalformedError, decode

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
        """Return the images of a request that has not ended, or None."""
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


MOST_BYTES = 32 << 20
"""The most bytes of tensors in unanswered messages: the limit of a connection."""

_ATTACHED = msgspec.msgpack.Decoder(tuple[bytes, tuple[SentTensor, ...]])
_SUBMITS = msgspec.msgpack.Decoder(Submit)


class MovedImages:
    """The filter between an agent and its I/O that adds and removes images.

    :param sent: the engine's images; it keeps the tensors of its requests.
    :param has_request: returns whether the engine's core has an attempt at a request.
    """

    def __init__(
        self,
        store: ImageStore,
        sent: SentImages,
        agent: Agent,
        has_request: Callable[[RequestId, int], bool],
    ) -> None:
        self._store, self._sent, self._agent = store, sent, agent
        self._has_request = has_request
        self._coming: dict[Transfer, tuple[Attempt, Taken]] = {}
        self._going: dict[Transfer, int] = {}

    def outgoing(self, action: Action) -> Action | Heard:
        """Return the action with its images, or the core's answer if they cannot be sent."""
        if not isinstance(action, Send) or not isinstance(action.message, Prepare | Ask):
            return action
        message = action.message
        ids = _ids_of_images(message)
        if not len(ids):
            return action
        contents = self._store.contents(ids)
        if isinstance(message, Ask) or not message.images:
            return Send(action.instance, msgspec.structs.replace(message, contents=contents))
        command = decode(_SUBMITS, message.private)
        taken = self._sent.of((command.request_id, command.attempt))
        size_bytes = sum(len(tensor.data) for tensor in taken.tensors) if taken is not None else 0
        self._going.pop(message.transfer, None)  # if it is sent again
        if problem := self._problem(taken, size_bytes):
            return Heard(action.instance, Abandon(message.transfer, problem))
        assert taken is not None
        self._going[message.transfer] = size_bytes
        attached = msgspec.msgpack.encode((taken.prompt, taken.tensors))
        extended = msgspec.structs.replace(message, contents=contents, attached=attached)
        return Send(action.instance, extended)

    def incoming(self, entry: PeerEntry) -> PeerEntry | Send:
        """Return the entry to pass to the core, or the answer to send in place of it."""
        if not isinstance(entry, Heard):
            return entry
        message = entry.message
        if isinstance(message, Prepared | Abandon):
            self._going.pop(message.transfer, None)
        if not isinstance(message, Prepare | Ask):
            return entry
        ids = _ids_of_images(message)
        problem = ""
        if len(ids) and not self._store.agrees(ids, message.contents):
            problem = "an image id in the text belongs to another image on this instance"
        elif isinstance(message, Prepare) and message.images and not message.inserts:
            problem = self._take(message)
        if not problem:
            cleared = {"attached": b""} if isinstance(message, Prepare) else {}
            return Heard(entry.peer, msgspec.structs.replace(message, contents=b"", **cleared))
        if isinstance(message, Ask):
            return Send(entry.peer, Declined(message.incarnation, message.number, problem))
        return Send(entry.peer, Abandon(message.transfer, problem))

    def settle(self) -> None:
        """Keep the images of requests that have arrived; release those of abandoned transfers.

        Call it when the core has processed all entries.
        """
        for transfer in [key for key in self._coming if key not in self._agent.receiving]:
            attempt, taken = self._coming.pop(transfer)
            if self._has_request(*attempt) and self._sent.of(attempt) is None:
                self._sent.keep(attempt, taken)
            else:
                self._sent.release(taken)
        for transfer in [key for key in self._going if key not in self._agent.sending]:
            del self._going[transfer]

    def _problem(self, taken: Taken | None, size_bytes: int) -> str:
        if taken is None or not taken.tensors:
            return "the tensors of its images are missing"
        if size_bytes > MOST_BYTES:
            return f"its images have more than {MOST_BYTES} bytes"
        if size_bytes + sum(self._going.values()) > MOST_BYTES:
            return "too many images are in transit"
        return ""

    def _take(self, message: Prepare) -> str:
        """Store the images of an arriving request; return the reason why that fails, or ""."""
        if message.transfer in self._coming:
            return ""
        try:
            command = decode(_SUBMITS, message.private)
            taken = self._sent.read(*decode(_ATTACHED, message.attached))
        except (MalformedError, ChangeSomething) as error:
            return f"its images cannot be read ({error})"
        prompt = taken.image_prompt
        is_it = to_token_bytes(prompt.token_ids) == command.spec.prompt
        if not is_it or prompt.images != command.spec.images:
            self._sent.release(taken)
            return "its images do not match its prompt"
        self._coming[message.transfer] = (command.request_id, command.attempt), taken
        return ""


def _ids_of_images(message: Prepare | Ask) -> npt.NDArray[np.int32]:
    tokens = np.frombuffer(message.tokens[: len(message.tokens) // 4 * 4], "<i4")
    return np.unique(tokens[tokens < 0]).astype(np.int32)
