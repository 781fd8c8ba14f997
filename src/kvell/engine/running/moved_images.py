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

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kvell.engine.protocol.messages import Submit
from kvell.engine.protocol.request_spec import SentTensor, to_token_bytes
from kvell.engine.running.sent_images import Attempt, SentImages, Taken
from kvell.errors import ChangeSomething
from kvell.mempool.agent import Agent
from kvell.mempool.entries import Heard, PeerEntry
from kvell.mempool.transfers.actions import Action, Send
from kvell.mempool.transfers.messages import Abandon, Ask, Declined, Prepare, Prepared, Transfer
from kvell.models.images.image_store import ImageStore
from kvell.vocabulary import RequestId
from kvell.wire.decoding import MalformedError, decode

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
