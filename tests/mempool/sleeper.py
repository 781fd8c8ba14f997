"""A process with a pool that does as it is told, and stops itself in the middle of a transfer.

Each line of its input is a command, ``[name, argument, …]`` as JSON, and is answered with a line.
"""

import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvell.errors import TryLater
from kvell.memory import audit
from kvell.mempool.pool import MemPool
from kvell.mempool.transports.rights import Rights, RightsOfPeer
from tests.mempool.pools import fill, holds_right, pool_at
from tests.mempool.seen import num_receiving

NAME = "b"
"""Whom ``tests.mempool.sender`` sends to."""
LARGE_PAGES = 64
"""Of each pool."""
OVERWRITTEN = 0xEE
"""What is written over pages once they are somebody else's."""
FIRST, NEXT, LOOK = "before the first piece", "between pieces", "before the look at the right"
MOMENTS_OF_RECEIVER = (FIRST, NEXT, LOOK)
OFFER = "before the offer"


class Sleep:
    """Stops the process once, at a moment of its next transfer.

    :ivar stale_pieces: that were read when others had been written over them.
    """

    def __init__(self) -> None:
        self._moment, self._pieces, self.stale_pieces = "", 0, 0
        copy, stands, grant = np.copyto, RightsOfPeer.stands, Rights.grant

        def copied(target: Any, source: Any) -> None:
            self._comes_to(NEXT if self._pieces else FIRST)
            self._pieces += 1
            copy(target, source)
            self.stale_pieces += bool((target == OVERWRITTEN).all())

        def looked(rights: RightsOfPeer, number: int) -> bool:
            self._comes_to(LOOK)
            return stands(rights, number)

        def granted(rights: Rights, number: int, *offered: Any) -> None:
            self._comes_to(OFFER)
            grant(rights, number, *offered)

        np.copyto = copied  # type: ignore[assignment]
        RightsOfPeer.stands = looked  # type: ignore[assignment,method-assign]
        Rights.grant = granted  # type: ignore[assignment,method-assign]

    def before(self, moment: str) -> None:
        self._moment, self._pieces = moment, 0

    def _comes_to(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            # Not os.kill: another thread might take the signal, and this one go on meanwhile.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Sleeper:
    def __init__(self, pool: MemPool, folder: Path) -> None:
        self._pool, self._folder, self._sleep = pool, folder, Sleep()

    def sleep(self, moment: str) -> None:
        self._sleep.before(moment)

    def connect(self, name: str) -> str:
        return self._pool.connect(self._folder / name)

    def fill(self, text: list[int]) -> None:
        fill(self._pool, text)

    def send(self, name: str, text: list[int]) -> str:
        """Send a text; why it was not taken, or ""."""
        try:
            self._pool.transfer_with_insert(name, text)
        except TryLater as error:
            return str(error)
        return ""

    def state(self, text: list[int]) -> dict[str, Any]:
        pool = self._pool
        lease = pool.match(text)
        told = {"hit": lease.hit_tokens, "right": holds_right(pool, lease, text)}
        pool.free_mem(lease)
        return told | {
            "stale": self._sleep.stale_pieces,
            "coming": num_receiving(pool),
            "used": sum(pool.core.snapshot().used),
            "problems": audit(pool.layout, pool.core.snapshot()),
        }


def main(folder: Path) -> None:
    with pool_at(folder, NAME, large_pages=LARGE_PAGES) as pool:
        sleeper = Sleeper(pool, folder)
        _say("ready")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            _say(getattr(sleeper, name)(*arguments))


def _say(answer: str | dict[str, Any] | Sequence[Any] | None) -> None:
    print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
