"""An engine's link to the pool of instances: messages, copies and time, between its steps."""

import contextlib
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import override

from kvell.engine.lending.distributed_request import section_bytes
from kvell.engine.requests.plan import BorrowedPages
from kvell.engine.running.engine_link import EngineLink
from kvell.engine.running.moved_images import MovedImages
from kvell.memory import GroupSpec
from kvell.mempool.agent import Agent
from kvell.mempool.entries import Heard, PeerEntry, PeerLost
from kvell.mempool.node import PageTransferThread
from kvell.mempool.owners import Tick
from kvell.mempool.rendezvous import NetworkRendezvous, Rendezvous
from kvell.mempool.transfers.actions import Action, Grant, Revoke, Send
from kvell.mempool.transfers.messages import Offer, Transfer, Written
from kvell.mempool.transports.lent_attention import RightsWords
from kvell.mempool.transports.neighbours import MappedPeers
from kvell.mempool.transports.page_copies import Bytes
from kvell.models.partials.remote_sections import model_of
from kvell.models.partials.served_layers import ServedLayers

if TYPE_CHECKING:
    from kvell.models.partials.attention_service import AttentionService

END_SECONDS = 30.0
"""Pages that are read for longer are not reused; reading a section takes milliseconds."""


def _service(model: ServedLayers, words: RightsWords) -> "AttentionService":
    # Imported here: it is compiled, as the kernels of these models.
    from kvell.models.partials.attention_service import AttentionService

    return AttentionService(model, words)


class SectionAnswers:
    """A :class:`.LentAttention` over the pool of several models' layers.

    :param models: the layers of each model whose kernels are compiled, by the model's number.
    """

    def __init__(self, models: Mapping[int, ServedLayers], words: RightsWords) -> None:
        self._full_groups = {number: model.full_groups for number, model in models.items()}
        self._services = {number: _service(model, words) for number, model in models.items()}
        self._numbers: dict[str, int] = {}

    def lend(self, right: int, debtor: str, pages: Sequence[Sequence[int]]) -> None:
        """Let a debtor query a section under a right (:class:`.LentAttention`)."""
        for number, service in self._services.items():
            full = self._full_groups[number]
            own = [some if group in full else () for group, some in enumerate(pages)]
            if any(own):
                service.lend(right, self._number(debtor), own)

    def end(self, right: int) -> None:
        """End a right; return once its pages are no longer read (:class:`.LentAttention`).

        :raises RuntimeError: if they are still read after ``END_SECONDS``.
        """
        for service in self._services.values():
            if not service.end(right, END_SECONDS):
                problem = f"what is lent under {right} was read for {END_SECONDS:g} s"
                raise RuntimeError(problem)

    def answer(self, debtor: str, query: bytes) -> bytes:
        service = self._services.get(model_of(query)) or next(iter(self._services.values()), None)
        return b"" if service is None else service.answer(self._number(debtor), query)

    def close(self) -> None:
        self._services = {}

    def _number(self, debtor: str) -> int:
        return self._numbers.setdefault(debtor, len(self._numbers))


class PoolLink(EngineLink):
    """The owner of a :class:`.PageTransferThread` with the engine core's agent.

    :param memory: the pool and the CPU buffer after it, uint8 [bytes]; ``descriptor`` is their
        memfd.
    :param neighbours: mapping slots after the pool for pools of instances on this host.
    :param models: layers of each model over the pool, by the model's number; models without
        compiled kernels answer no queries.
    """

    def __init__(
        self,
        place: Rendezvous,
        agent: Agent,
        groups: Sequence[GroupSpec],
        memory: Bytes,
        descriptor: int,
        neighbours: MappedPeers | None = None,
        models: Mapping[int, ServedLayers] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.agent = agent
        self._images: MovedImages | None = None
        self._entries: queue.SimpleQueue[PeerEntry] = queue.SimpleQueue()
        self._streaming: dict[int, tuple[str, Transfer]] = {}
        is_tcp = isinstance(place.address(), str)
        lends = is_tcp and any(layers.full_groups for layers in models.values())
        self.asks = lends
        self.host = agent.instance if is_tcp else ""
        self.node = PageTransferThread(
            agent.instance,
            agent.incarnation,
            agent.fingerprint,
            self._take,
            groups,
            memory,
            descriptor,
            address=place.address(),
            finds=place.address_of,
            secret=place.secret(),
            neighbours=neighbours,
            lends=partial(SectionAnswers, models) if lends else None,
        )
        self._place = place
        borrows = neighbours is not None and (lends or not is_tcp)
        self.section_bytes = section_bytes(groups) if borrows else 0
        place.publish(self.node.address)
        self.node.start()

    @property
    @override
    def is_linked(self) -> bool:
        return True

    @property
    @override
    def listens(self) -> str:
        return self._place.listens if isinstance(self._place, NetworkRendezvous) else ""

    @override
    def move_images(self, make: Callable[[Agent], MovedImages]) -> None:
        self._images = make(self.agent)

    @override
    def meet(self, addresses: Mapping[str, str]) -> None:
        if isinstance(self._place, NetworkRendezvous):
            self._place.meet(addresses)

    @override
    def now(self) -> Tick:
        return self.node.now()

    @property
    @override
    def has_entries(self) -> bool:
        return not self._entries.empty()

    @override
    def entries(self) -> Iterator[PeerEntry]:
        self.bell.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._entries.get_nowait()
                if isinstance(entry, PeerLost):  # between two steps: no step reads its pool
                    self.node.creditors.take_away(entry.peer, entry.incarnation)
                checked = entry if self._images is None else self._images.incoming(entry)
                if isinstance(checked, Send):
                    self.node.post([checked])
                else:
                    yield checked

    @override
    def do(self, actions: Sequence[Action], deadline: Tick | None) -> None:
        others: list[Action] = []
        if self._images is not None:
            self._images.settle()
        for requested in actions:
            action = requested if self._images is None else self._images.outgoing(requested)
            if isinstance(action, Heard):
                self._take(action)
            elif isinstance(action, Grant):
                self.node.grant_right(action)
            elif isinstance(action, Revoke):
                self.node.revoke(action)
                self._streaming.pop(action.transfer.number, None)
            else:
                self._note(action)
                others.append(action)
        self.node.wake_at(deadline)
        if others:
            self.node.post(others)

    def written(self, numbers: Sequence[int], stage: int) -> None:
        """Report to the pullers of transfers that the step has written its stages up to ``stage``.

        Call it on the thread that runs the step, whose plan has these ``streams``.
        """
        streaming = [self._streaming[number] for number in numbers if number in self._streaming]
        self.node.post([Send(to, Written(transfer, stage)) for to, transfer in streaming])

    def stands(self, pages: BorrowedPages) -> bool:
        """Return whether this instance may still read pages in place; from any thread."""
        return self.node.creditors.stands(pages.instance, pages.incarnation, pages.right)

    @override
    def close(self) -> None:
        self.node.close()
        self.bell.close()

    def _note(self, action: Action) -> None:
        if not isinstance(action, Send) or not isinstance(action.message, Offer):
            return
        offer = action.message
        if offer.stages:
            self._streaming[offer.transfer.number] = action.instance, offer.transfer
        else:
            self._streaming.pop(offer.transfer.number, None)

    def _take(self, entry: PeerEntry) -> list[Action]:
        self._entries.put(entry)
        self.bell.ring()
        return []
