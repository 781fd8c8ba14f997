"""A process that sends one text after the other to whoever connects; its caller ends it."""

import sys
import time
from pathlib import Path

from kvell.errors import TryLater
from kvell.mempool.rendezvous import PageTransport
from tests.mempool.pools import fill, pool_at

LONGEST_SECONDS = 120.0
TEXT = list(range(100, 150))


def main(folder: Path, transport: PageTransport) -> None:
    ends = time.monotonic() + LONGEST_SECONDS
    with pool_at(folder, "sender", transport=transport) as pool:
        print("ready", pool.address, sep="\n", flush=True)  # noqa: T201
        number = 0
        while time.monotonic() < ends and number < 400:
            if not pool.peers():
                continue
            text = [number, *TEXT]
            fill(pool, text)
            try:
                pool.transfer_with_insert("b", text)
            except TryLater:
                continue
            number += 1
        while time.monotonic() < ends:
            pool.peers()


if __name__ == "__main__":
    main(Path(sys.argv[1]), "tcp" if "tcp" in sys.argv[2:] else "memory")
