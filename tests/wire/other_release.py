"""A process of another release that lets others in: ``other_release.py RELEASE``.

It says where it listens, and what it did not let in; it ends with its stdin.
"""

import logging
import sys

import kvell.release

if __name__ == "__main__":
    kvell.release.RELEASE = sys.argv[1]

from kvell.wire.doorway import Doorway
from kvell.wire.endpoints import listen_at
from kvell.wire.greeting import Greeting

SECRET = bytes(range(32))


def main() -> None:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
    told = Greeting("manager", 1, "", 0)
    enters = {"cluster": lambda _heard, sock: sock.close()}
    doorway = Doorway(listen_at("tcp://127.0.0.1:0"), told, SECRET, enters)  # type: ignore[arg-type]
    doorway.open()
    sys.stdout.write(f"{doorway.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    doorway.close()


if __name__ == "__main__":
    main()
