"""A front of a cluster as a process, with endless requests, until somebody kills it.

Arguments: where the manager listens, how many requests at once, a seed, and maybe files of jobs to
ask in place of endless fake requests.  The first bytes of stdin are the secret; when stdin ends, so
does this process.  Prints the front's name, and how many of its requests run, once all of them do,
or one job; later what no request may get.  After SIGTERM some requests end, and it prints what came
of all.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

from kvell.fleet.followed.followed_members import FollowedCluster, ManagerAddress
from kvell.front.front import Front
from kvell.serving.fronts import read_secret
from tests.async_engine.jobs import Job, read_jobs
from tests.fleet.faults.load import Load, fake_requests, known_requests

ENDLESS = 1_000_000


async def serve(secret: bytes, address: str, streams: int, seed: str, jobs: list[Job]) -> None:
    async def find() -> ManagerAddress:
        return ManagerAddress(address, secret, "")

    joins = FollowedCluster(find)
    async with Front(joins=joins) as front:
        draw = known_requests(jobs) if jobs else fake_requests(ENDLESS, ENDLESS)
        load = Load(front, seed, streams, draw)
        async with load:
            least = 1 if jobs else streams  # a job may wait for memory for minutes
            while front.in_flight < least or not (jobs or all_speak(front)):
                await asyncio.sleep(0.005)
            say(f"{joins.name} {front.in_flight}")
            is_over = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
            while not load.wrong and not is_over.is_set():
                await load.goes_on(1)
            if not load.wrong:
                await load.ends_more(streams)  # not all: one may wait for memory for minutes
            say(json.dumps([load.wrong, load.ends, [*load.refusals], [*load.turned_away]]))


def all_speak(front: Front) -> bool:
    return all(entry.emitted_tokens for entry in front.entries().in_flight)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    address, streams, seed, *files = sys.argv[1:]
    jobs = [job for file in files for job in read_jobs(Path(file))]
    stdin = sys.stdin.fileno()
    secret = read_secret(stdin)
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    asyncio.run(serve(secret, address, int(streams), seed, jobs))
    return 0


def _end_with(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
