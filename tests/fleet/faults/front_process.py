"""A front of a cluster as a process, with endless requests, until somebody kills it.

Arguments: where the manager listens, how many requests at once, and a seed.  The first bytes of
stdin are the secret; when stdin ends, so does this process.  Prints the front's name once all of
its requests run, and later what no request may get.
"""

import asyncio
import os
import sys
import threading

from kvell.fleet.followed.followed_members import FollowedCluster
from kvell.fleet.followed.manager_link import ManagerAddress
from kvell.front.front import Front
from kvell.serving.door import read_secret
from tests.fleet.faults.load import Load

ENDLESS = 1_000_000


async def serve(secret: bytes, address: str, streams: int, seed: str) -> None:
    async def find() -> ManagerAddress:
        return ManagerAddress(address, secret, "")

    joins = FollowedCluster(find)
    async with Front(joins=joins) as front:
        load = Load(front, seed, streams, ENDLESS, ENDLESS)
        async with load:
            await load.goes_on(20 * streams)
            while any(not entry.emitted_tokens for entry in front.entries()[0]):
                await asyncio.sleep(0.005)
            say(f"{joins.name} {front.in_flight}")
            while not load.wrong:
                await load.goes_on(1)
            say(load.wrong[0])


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    address, streams, seed = sys.argv[1:]
    stdin = sys.stdin.fileno()
    secret = read_secret(stdin)
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    asyncio.run(serve(secret, address, int(streams), seed))
    return 0


def _end_with(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
