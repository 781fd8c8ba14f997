"""Threads for texts, pictures and bodies: long texts delay only other long texts."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from kvell.device.available import give_back_freed
from kvell.engine.protocol.request_spec import SentTensor
from kvell.engine.protocol.statistics import InstanceFacts
from kvell.engine.requests.turns import EqualParts, Turn, TurnQueue, leaves_parts
from kvell.errors import Bound, TryLater
from kvell.models.images.picture_files import MEMORY_PER_PIXEL, MOST_PIXELS
from kvell.models.images.processor import MOST_TENSOR_BYTES
from kvell.server.text.text_bounds import MOST_KEPT_BYTES, SHORT_BYTES, AnswerMemory, TextBounds
from kvell.server.text.text_model import TextModel
from kvell.vocabulary import MIB, RequestId

MOST_HELD_BYTES = 512 * MIB
"""At this sum of a tenant, no further picture of it is read; the last picture may exceed it.

All tenants together hold less than twice as much (:func:`.leaves_parts`), and their last pictures.
"""


class HeldTensors:
    """A count of tensors by weak references: a tensor counts while a request holds it."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[tuple[str, int], SentTensor] = WeakValueDictionary()
        self._numbers = count()

    def held_bytes(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for (tenant, _), tensor in list(self._tensors.items()):
            held[tenant] = held.get(tenant, 0) + len(tensor.data)
        return held

    def check(self, tenant: str) -> None:
        """Check that there is room for the tensors of another request.

        :raises TryLater: until some request with pictures has ended.
        """
        held = self.held_bytes()
        if not leaves_parts(held, tenant, 1, MOST_HELD_BYTES):
            held_bytes = held.get(tenant) or sum(held.values())
            problem = f"requests in flight have {held_bytes} bytes of pictures; retry later"
            raise TryLater(problem, bound="image_pixels")

    def hold(self, tenant: str, tensors: Iterable[SentTensor]) -> None:
        for tensor in tensors:
            self._tensors[tenant, next(self._numbers)] = tensor


Made = TypeVar("Made")
WAITING_BYTES = 32 * MIB
"""The unit of the bounds on bytes that wait for a thread."""


@dataclass(eq=False)
class _Piece(Generic[Made]):
    """A piece of work that waits for the thread.

    :param made: the result, which the caller awaits.
    """

    request_id: RequestId
    turn: Turn
    size_bytes: int
    work: Callable[[], Made]
    made: "asyncio.Future[Made]"


class Lane:
    """One thread and its queue; tenants take turns, and the work of each tenant is in order.

    :param bound: the bound that errors name when too much waits.
    :param most_bytes: the most bytes that wait or are worked on (:class:`.EqualParts`).
    :param trims: whether freed memory is returned to the system after each piece of work.
    """

    def __init__(self, name: str, bound: Bound, most_bytes: int, *, trims: bool) -> None:
        self._bytes = EqualParts(most_bytes, bound, "bytes wait to be read")
        self._trims = trims
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._line: TurnQueue[_Piece[Any]] = TurnQueue()
        self._running: _Piece[Any] | None = None
        self._numbers = count()

    async def run(self, size_bytes: int, work: Callable[[], Made], tenant: str = "") -> Made:
        """Run a piece of work in the thread, and return its result.

        Cancelling the caller removes work that waits; work that runs is finished first.

        :param tenant: owner, whose turn is used and who is charged.
        :raises TryLater: if too much waits already.
        """
        self._bytes.take(tenant, size_bytes)
        turn = Turn(tenant=tenant)
        made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        piece = _Piece(RequestId(str(next(self._numbers))), turn, size_bytes, work, made)
        if self._running is None:
            self._begin(piece)
        else:
            if not (self._running.made.done() or self._line.knows(self._running)):
                self._line.count_served(self._running)  # only now others wait for their turns
                self._line.charge(self._running.request_id, self._running.size_bytes)
            self._line.add(piece)
        try:
            return await made
        finally:
            if made.cancelled() and self._line.discard(piece):  # before its turn
                self._forget(piece)

    def _begin_next(self) -> None:
        """Submit the next tenant's work to the thread."""
        while self._running is None and (piece := self._line.first()) is not None:
            self._line.take(piece)
            self._line.charge(piece.request_id, piece.size_bytes)
            self._begin(piece)

    def _begin(self, piece: "_Piece[Any]") -> None:
        work = partial(_trimmed, piece.work) if self._trims else piece.work
        try:
            submitted = self._thread.submit(work)
        except RuntimeError as error:  # the lane is closed
            self._tell(piece, error)
            return
        self._running = piece
        running = asyncio.wrap_future(submitted, loop=piece.made.get_loop())
        running.add_done_callback(partial(self._heard, piece))

    def _heard(self, piece: "_Piece[Made]", running: "asyncio.Future[Made]") -> None:
        """Pass the result of a piece of work to its caller, and begin the next piece."""
        if running.cancelled():
            piece.made.cancel()
            self._forget(piece)
        elif (error := running.exception()) is not None:
            self._tell(piece, error)
        else:
            if not piece.made.done():
                piece.made.set_result(running.result())
            self._forget(piece)
        self._running = None
        if self._line.waiting:
            self._begin_next()

    def _tell(self, piece: "_Piece[Made]", error: BaseException) -> None:
        """Pass an error to the caller of a piece of work, unless the caller was cancelled."""
        if not piece.made.done():
            piece.made.set_exception(error)
        self._forget(piece)

    def _forget(self, piece: "_Piece[Made]") -> None:
        self._line.discard(piece)
        self._bytes.give_back(piece.turn.tenant, piece.size_bytes)

    def close(self) -> None:
        """End the thread, after the work that it has begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _trimmed(work: Callable[[], Made]) -> Made:
    try:
        return work()
    finally:
        give_back_freed()


class TextWork:
    """The lanes of one process, which all its models share.

    ``held`` counts tensors of pictures in requests that have not ended, ``answers`` the bytes of
    answers that are not sent yet.

    :ivar tenant: owner of the work.
    """

    def __init__(self) -> None:
        self.tenant = ""
        self._short = Lane("kvell-short-texts", "text_bytes", WAITING_BYTES, trims=False)
        self._long = Lane("kvell-long-texts", "text_bytes", WAITING_BYTES, trims=True)
        self._pictures = Lane("kvell-pictures", "image_pixels", 2 * WAITING_BYTES, trims=True)
        self._bodies = Lane("kvell-bodies", "body_bytes", 8 * WAITING_BYTES, trims=False)
        self.held = HeldTensors()
        self.answers = AnswerMemory()

    def of(self, tenant: str) -> "TextWork":
        work = copy.copy(self)
        work.tenant = tenant
        return work

    def run(self, size_bytes: int, work: Callable[[], Made]) -> Coroutine[None, None, Made]:
        """Run work on a text in the lane of short or of long texts.

        :raises TryLater: if too many texts of this kind wait.
        """
        lane = self._short if size_bytes <= SHORT_BYTES else self._long
        return lane.run(size_bytes, work, self.tenant)

    def run_pictured(
        self, size_bytes: int, work: Callable[[], Made]
    ) -> Coroutine[None, None, Made]:
        """Run work on the pictures of one request.

        :raises TryLater: if too many pictures wait.
        """
        return self._pictures.run(size_bytes, work, self.tenant)

    def run_body(self, size_bytes: int, work: Callable[[], Made]) -> Coroutine[None, None, Made]:
        """Run the decompression or the check of one body.

        :raises TryLater: if too many bodies wait.
        """
        return self._bodies.run(size_bytes, work, self.tenant)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._short, self._long, self._pictures, self._bodies):
            lane.close()


PICTURE_BYTES = MEMORY_PER_PIXEL * MOST_PIXELS + 2 * MOST_HELD_BYTES + MOST_TENSOR_BYTES
"""The most memory for decoding one request's pictures and for the tensors of all requests."""


def most_work_bytes(facts: InstanceFacts, first: TextModel, beside: Sequence[TextModel]) -> int:
    """Return the largest working set for texts, pictures and kept answers.

    :param facts: of an instance, on its first model and the other models.
    """
    models = [
        (first, facts.lengths().longest_tokens),
        *((model, facts.lengths(model.name).longest_tokens) for model in beside),
    ]
    texts_bytes = max(
        TextBounds(max_model_len, model.most_token_bytes).memory_bytes
        for model, max_model_len in models
    )
    if any(model.takes_images for model, _ in models):
        # The thread of pictures encodes their text.
        texts_bytes = 2 * texts_bytes + PICTURE_BYTES
    return texts_bytes + MOST_KEPT_BYTES
