"""A machine of a test, as a process: keepers of instances, which take orders on stdin.

Arguments: what it runs as an instance.  The first bytes of stdin are the cluster's secret, and
replies go to stdout.  When this process is killed, nobody holds the pipes of its instances any
more, and they end by themselves.
"""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from kvell.fleet.placing.launcher import Launcher
from kvell.serving.fronts import read_secret
from kvell.wire.frames import FrameReader
from tests.fleet.faults.machines.orders import READ_BYTES, Order, Reply, encoded, order_of

HOST = "127.0.0.1"


class _Keeping:
    """A keeper with the one thread that it is called from."""

    def __init__(self, secret: bytes) -> None:
        self.keeper = Launcher(secret, HOST, 1, sys.argv[1:])
        self.thread = ThreadPoolExecutor(1)

    def carry_out(self, order: Order) -> Reply:
        try:
            if order.what == "start":
                placed = self.keeper.start(order.words, order.incarnation)
                return Reply(order.call, placed=placed)
            if order.what == "ended":
                return Reply(order.call, ended=self.keeper.end_of(order.incarnation))
            if order.what == "stop":
                self.keeper.stop(order.incarnation)
            else:
                self.keeper.close()
        except OSError as error:
            return Reply(order.call, problem=str(error))
        return Reply(order.call)


def main() -> int:
    orders, replies = sys.stdin.fileno(), os.dup(sys.stdout.fileno())
    secret, reader, saying = read_secret(orders), FrameReader(), threading.Lock()
    keepings: dict[str, _Keeping] = {}

    def carry_out(keeping: _Keeping, order: Order) -> None:
        reply = encoded(keeping.carry_out(order))
        with saying:
            os.write(replies, reply)

    while data := os.read(orders, READ_BYTES):
        for body in reader.feed(data):
            order = order_of(body)
            if order.instance_id not in keepings:
                keepings[order.instance_id] = _Keeping(secret)
            keeping = keepings[order.instance_id]
            keeping.thread.submit(carry_out, keeping, order)
            if order.what == "leave":
                del keepings[order.instance_id]
    for keeping in keepings.values():
        keeping.thread.submit(keeping.keeper.close)
        keeping.thread.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
