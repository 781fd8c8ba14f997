"""A process whose engine goes on with requests that the bench hands over, until its input ends."""

import select
import sys
from pathlib import Path

from bench.mempool.handing import engine_at


def main(folder: Path, transport: str) -> None:
    """Serve until standard input ends; prints a line once it can."""
    engine = engine_at("receiver", folder, transport, "by_request")
    wakes = engine.wakes()
    assert wakes is not None
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([wakes, sys.stdin], [], [], 0 if engine.has_work() else None)
        if sys.stdin in ready:
            break
        engine.woken()
        if engine.has_work():
            engine.step()
    engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
