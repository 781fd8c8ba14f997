"""A manager's lead over its instances: they obey the highest epoch that they have seen."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvell.cluster.steering.epochs import Leadership
from kvell.engine.protocol.leading import Lead, Led
from kvell.errors import InstanceDied, KvellError
from kvell.fleet.instance.site import Site
from kvell.fleet.started.members import Members

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time for the site to return what runs, before a cluster is ended."""


class InstanceLead:
    """The instances that obey a manager, and its withdrawal when a newer one leads.

    :param on_changed: called when the epoch rises, or a newer manager leads.
    """

    def __init__(
        self, members: Members, leadership: Leadership, on_changed: Callable[[], None]
    ) -> None:
        self._members = members
        self._leadership = leadership
        self._on_changed = on_changed
        self._obeying: set[str] = set()
        self._abandoning: asyncio.Task[None] | None = None

    def on_ready(self, instance_id: str) -> None:
        self._obeying.discard(instance_id)
        self._lead(instance_id)

    def on_led(self, instance_id: str, event: Led) -> None:
        self.on_epoch(event.epoch)
        if event.epoch == self._leadership.epoch:
            self._obeying.add(instance_id)

    def settle(self) -> None:
        serving = {member.instance_id for member in self._members if member.is_serving}
        if serving <= self._obeying:
            self._leadership.settle()

    def on_epoch(self, epoch: int) -> None:
        """Handle an epoch that another process has seen: lead on, rise above it, or stand down."""
        standing = self._leadership.on_epoch(epoch)
        if standing == "rose":
            self._obeying.clear()
            for member in self._members:
                self._lead(member.instance_id)
            self._on_changed()
        elif standing == "outranked" and self._abandoning is None:
            logger.warning("a newer manager leads (epoch %d); this one stops", epoch)
            self._abandoning = asyncio.create_task(self._members.abandon())
            self._on_changed()

    async def look_for_newer(self, site: Site) -> None:
        with contextlib.suppress(TimeoutError, KvellError):
            async with asyncio.timeout(LOOK_SECONDS):
                incarnations = await site.find()
                if self._leadership.on_incarnations(incarnations.values()) == "outranked":
                    self.on_epoch(self._leadership.outranked_by)

    async def wait_abandoned(self) -> bool:
        if self._abandoning is None:
            return False
        await self._abandoning
        return True

    def _lead(self, instance_id: str) -> None:
        with contextlib.suppress(InstanceDied):
            self._members[instance_id].supervisor.send(Lead(self._leadership.epoch))
