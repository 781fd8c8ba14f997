"""A process with a pool that has a text cached, and listens until its input ends."""

import sys
from pathlib import Path
from typing import cast

from kvell.mempool.rendezvous import PageTransport
from tests.mempool.pools import fill, pool_at

NAME = "filled"
TEXT = list(range(100, 150))


def main(folder: Path, transport: PageTransport) -> None:
    with pool_at(folder, NAME, transport=transport) as pool:
        fill(pool, TEXT)
        print(pool.address, flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), cast(PageTransport, sys.argv[2]))
