"""The resources that instances of one host share: processors, memory and one copy of weights."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from kvell.cluster.instances import processor_shares
from kvell.device.available import available_bytes, tree_bytes
from kvell.errors import ChangeSomething
from kvell.fleet.instance.instance_process import InstanceProcess, LaunchPlan
from kvell.mempool.rendezvous import make_folder
from kvell.vocabulary import MIB


class Host:
    """The machine that a front and its instances run on: a :class:`.Site` of child processes.

    :param processors: processors for instances; by default all that this process may use.
    """

    def __init__(self, processors: Sequence[int] | None = None) -> None:
        self._processors = tuple(processors or sorted(os.sched_getaffinity(0)))
        self._weights_fd: int | None = None
        self._pool_folder: Path | None = None
        self._slots: dict[str, int] = {}

    async def find(self) -> dict[str, int]:
        return {}

    async def rejoin(self, instance_id: str) -> InstanceProcess | None:
        """Return None: there is nothing to connect to."""
        return None

    async def launch(
        self, instance_id: str, command: Sequence[str], plan: LaunchPlan
    ) -> InstanceProcess:
        values = {
            **plan.values,
            **self.share_of(instance_id),
            "weights_fd": "-1",
            "pool_dir": self.pool_folder(),
        }
        fds: tuple[int, ...] = ()
        if len(self._slots) > 1:
            fds = (self.weights_fd(),)
            values["weights_fd"] = str(fds[0])
        return await InstanceProcess.launch(
            command, replace(plan, values=values, inherited_fds=fds)
        )

    async def close(self) -> None:
        """Free the weights, once no instance maps them either, and the pool's folder."""
        if self._weights_fd is not None:
            os.close(self._weights_fd)
            self._weights_fd = None
        if self._pool_folder is not None:
            shutil.rmtree(self._pool_folder, ignore_errors=True)
            self._pool_folder = None

    def pool_folder(self) -> str:
        if self._pool_folder is None:
            self._pool_folder = Path(tempfile.mkdtemp(prefix="kvell-pool-"))
            make_folder(self._pool_folder)
        return str(self._pool_folder)

    def weights_fd(self) -> int:
        if self._weights_fd is None:
            self._weights_fd = os.memfd_create("kvell-weights", os.MFD_CLOEXEC)
        return self._weights_fd

    def enter(self, instance_id: str) -> None:
        taken = set(self._slots.values())
        self._slots[instance_id] = next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def leave(self, instance_id: str) -> None:
        self._slots.pop(instance_id, None)

    def share_of(self, instance_id: str) -> dict[str, str]:
        """Return processors and threads of an instance's next start, for its command line.

        An instance that is alone on the host gets neither, and uses what is there.
        """
        if len(self._slots) < 2:
            return {"processors": "", "threads": "0"}
        slot = self._slots[instance_id]
        count = max(len(self._slots), slot + 1)
        share = processor_shares(self._processors, count)[slot]
        processors = ",".join(str(processor) for processor in share.processors)
        return {"processors": processors, "threads": str(share.threads)}

    def check_room(self, contracts: Iterable[tuple[int | None, int]], further: int) -> None:
        instances = [(pid, promised) for pid, promised in contracts if promised]
        if not instances or further <= 0:
            return
        largest_bytes = max(promised for _, promised in instances)
        taken_bytes = sum(tree_bytes(pid) for pid, _ in instances if pid)
        promised_bytes = sum(promised for _, promised in instances)
        left_bytes = available_bytes() + taken_bytes - promised_bytes
        fitting = max(0, left_bytes) // largest_bytes
        if fitting < further:
            raise ChangeSomething(
                "instances",
                len(instances) + further,
                f"need {largest_bytes // MIB:,} MiB each, "
                f"and the machine has {max(0, left_bytes) // MIB:,} MiB left for more",
                f"use at most {len(instances) + fitting}, or a smaller --kv-memory",
            )
