"""The memory of a server's processes on this machine, read seldom and on a thread of its own.

The system walks all pages of a process to compute its size.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvell.device.process_size import process_bytes, tree_bytes
from kvell.front.front import Front
from kvell.server.map.refreshed import LatestAnswer

REFRESH_SECONDS = 1.0


@dataclass(frozen=True)
class MeasuredSizes:
    """MeasuredSizes in bytes.

    :param front: size of this process.
    :param instances: sizes of instances with a process on this machine, by id.
    """

    front: int
    instances: Mapping[str, int]


class ProcessSizes:
    """The sizes of this process and of a front's instances."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvell-process-sizes")
        self._sizes = LatestAnswer(self._read, front.now_seconds, REFRESH_SECONDS)

    async def measure(self) -> MeasuredSizes:
        return await self._sizes.latest()

    async def _read(self) -> MeasuredSizes:
        members = [member for member, _ in self._front.instances()]
        pids = {each.instance_id: each.pid_here for each in members if each.pid_here}
        return await asyncio.get_running_loop().run_in_executor(self._thread, _sizes_of, pids)


def _sizes_of(pids: Mapping[str, int]) -> MeasuredSizes:
    return MeasuredSizes(process_bytes(), {name: tree_bytes(pid) for name, pid in pids.items()})
