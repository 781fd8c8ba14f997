"""The manager of a test's cluster: a process that is killed and started again."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from tests.fleet.faults.instances import Instances
from tests.fleet.faults.machines.orders import ROOT
from tests.fleet.faults.wires import Wires
from tests.front.scenarios import until

LEASE_SECONDS, LONELY_SECONDS = 10.0, 10.0
"""Fronts that lost their manager find the next within this time."""


class ManagedCluster:
    """Starts the manager's process, and knows the door in front of the one that lives.

    :param machines: path of the machines' socket.
    :ivar times: seconds of a front's lease, and of a cluster without any front.
    :ivar address: of the door; a front that asks for it after a restart finds another.
    :ivar pids: of all processes that were started.
    """

    def __init__(self, wires: Wires, secret: bytes, machines: str, instances: Instances) -> None:
        self._wires, self._secret = wires, secret
        self._machines, self._instances = machines, instances
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self.times = LEASE_SECONDS, LONELY_SECONDS
        self.address = ""
        self.pids: list[int] = []

    def another(self) -> "ManagedCluster":
        """A second manager of the same instances; not started."""
        one = ManagedCluster(self._wires, self._secret, self._machines, self._instances)
        one.times = self.times
        return one

    async def start(self, *, elsewhere: bool = False) -> None:
        """Start a process, and wait until it listens.

        :param elsewhere: at another address than the one before.
        """
        port = 0 if elsewhere else self._port
        instances = self._instances
        times = *self.times, instances.startup_seconds, instances.silence_seconds
        counts = json.dumps(dict(instances.counts))
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fleet.faults.manager_process"),
            *(self._machines, str(port), counts, json.dumps(times), *instances.words),
            cwd=ROOT,
            stdin=pipe,
            stdout=pipe,
        )
        self.pids.append(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(self._secret)
        said = (await self._process.stdout.readline()).decode().strip()
        assert said, "the manager did not start"
        door = self.address if port else ""
        self._port = int(said.rpartition(":")[2])
        if not door:
            if self.address:
                self._wires.close_door(self.address)
            self.address = await self._wires.door("manager", said)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await until(lambda: self.is_stopped)

    def go_on(self) -> None:
        assert self.is_stopped, "nothing happened to it"
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    async def kill(self) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        return await self.ended()

    async def ended(self) -> int:
        """Wait until it has ended; its exit status."""
        assert self._process is not None and self._process.stdin is not None
        status = await self._process.wait()
        self._process.stdin.close()
        return status
