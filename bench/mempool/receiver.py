"""A process that takes in what the bench sends, until its standard input ends."""

import sys
from pathlib import Path

from bench.mempool.calls import POOL_BYTES
from bench.replay.shapes import layout_of, read_shape
from kvell.mempool.pool import MemPool


def main(shape: str, folder: Path) -> None:
    """Serve one sender."""
    layout = layout_of(read_shape(shape), POOL_BYTES)
    with MemPool(layout, instance="receiver", address=folder / "receiver") as pool:
        pool.memory[:] = 0  # every page has its memory
        print("ready", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
